"""Whatever clients and replicas name, the gateway remembers no more than so much of it.

A walk over all that a running gateway keeps, from its composition root and from its modules, before and after a flood of random
names through the real ways of a request. Names of clients: models behind a "*" pool, salts, sessions, tenants, keys, request
ids, priorities, paths, header names; of replicas: models in their lists, statuses, headers, events, counts. Ways: plain answers
and streams, failures of every kind before and after the first byte, resumption, the line and what is refused from it, clients
that leave. That the flood took each of them is asserted, or a table that is filled on one of them would not be seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import random
import re
import sys
import types
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from yarl import URL

from bench.measure.ports import free_port
from gateway.app import compose
from gateway.features.adoption.interrupted import MAX_KNOWN, InterruptedAnswers
from gateway.features.audit.twins import PROMPTS, PromptTwins
from gateway.server.endpoints import clients_runner
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.request_log import RequestLog
from router.learning.sessions import MAX_NEW
from tests.gateway.conftest import FORGETS_AT_ONCE, Running, serving_runner
from tests.support.compiled import uncompiled
from tests.support.configs import load
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    chunk,
    dies,
    dies_in_plain_body,
    dies_now,
    event,
    http,
    models,
    usage,
)
from tests.support.tiers import gate

# What is full after the first rounds must not grow in the last ones, which bring other names, and longer ones.
FILL, REQUESTS = 100, 200  # of a round that fills the tables, and of another one
FILLING, FULL, FLOOD = 15, 2, 4  # rounds
CLIENTS, PLACES = 10, 4
SLACK = 2000, 600_000  # entries and bytes: a table of 1024 that is emptied when it is full goes up and down by so much
LEAK = 12, 0.1  # entries, and share of all: what has grown by less in the last rounds was full
LENGTHS = 1000, 20_000  # of long names, before and after; where a field takes no more than 1000, that is its bound

# Where a walk ends: code, the event loop with what is in flight there, the request log's sink.
OUTSIDE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.FrameType,
    types.CoroutineType,
    types.GeneratorType,
    asyncio.AbstractEventLoop,
    asyncio.Future,
    asyncio.Handle,
    logging.Logger,
    io.IOBase,
)


CONTAINERS = dict, list, set, tuple, deque, bytearray


class Names:
    """Random names, a few of them long. trouble: the share of what fails."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.long = LENGTHS[0]
        self.trouble = 0.0

    def name(self, most: int = 1 << 20) -> str:
        """Of at most `most` letters."""
        length = min(most, self.long) if self.chance.random() < 0.1 else self.chance.randint(8, 20)
        return self.chance.randbytes(length // 2).hex()

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name(256),
            "messages": [{"role": "user", "content": self.chance.randbytes(2000).hex()}],
            "cache_salt": self.name(),
            "user": self.name(),
            self.name(): self.name(),
        }
        if self.chance.random() < 0.5:
            body["stream"] = True
        return body

    def headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.name(1000)}",
            "X-Tenant-Id": self.name(1000),
            "X-Session-Id": self.name(1000),
            "X-Request-Id": self.name(100),
            "X-Priority": str(self.chance.randrange(-110, 110)) if self.chance.random() < 0.2 else "0",
            f"X-{self.name(1000)}": self.name(1000),
        }

    def path(self) -> str:
        if self.chance.random() < 0.9:
            return "/v1/chat/completions"
        return f"/v1/{self.name(1000)}"

    def answer(self) -> dict[str, Any]:
        """An answer, or one event of it, but for its choices."""
        counts = usage(self.chance.randrange(1, 5000), 2, self.chance.choice([None, 0, 10]))
        return {"id": self.name(), "model": self.name(), "usage": counts}


LEAVES = "leaves"  # the `user` of a request that nobody answers
LEAVES_S = 0.01, 0.05  # how long its client waits: in line, or for a replica


def answers_anything(names: Names) -> Behaviour:
    """A good answer with names and counts of its own, a stream where it is wanted, any status, or a failure of any kind."""
    chance = names.chance
    failures: list[Behaviour] = [dies, dies_in_plain_body, refuses(names), babbles(names)]

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        asked = request.json
        if asked["user"] == LEAVES or chance.random() < names.trouble / 20:
            await asyncio.Event().wait()  # until it is given up
        elif chance.random() < names.trouble:
            await chance.choice(failures)(request, writer)
        elif asked.get("stream"):
            writer.write(STREAM_HEAD)
            for _ in range(3):
                writer.write(chunk(event(names.name(), **names.answer())))
                await writer.drain()
                if chance.random() < names.trouble / 3:
                    return dies_now(writer)
            writer.write(chunk(DONE) + b"0\r\n\r\n")
        else:
            body = json.dumps({**names.answer(), "choices": []}).encode()
            status = 200 if chance.random() >= names.trouble else chance.choice([400, 404, 422])
            writer.write(http(status, body, "application/json", f"X-{names.name(1000)}: {names.name(1000)}"))
        return None

    return behave


def refuses(names: Names) -> Behaviour:
    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"error": {"message": names.name()}}).encode()
        status = names.chance.choice([429, 500, 503, 599])
        writer.write(http(status, body, "application/json", f"Retry-After: {names.chance.choice(['0', names.name(100)])}"))

    return behave


def babbles(names: Names) -> Behaviour:
    """What no engine sends: no HTTP, or an error as a stream's first event."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        error = b"data: " + json.dumps({"error": {"message": names.name()}}).encode() + b"\n\n"
        writer.write(names.chance.choice([names.name().encode() + b"\r\n\r\n", STREAM_HEAD + chunk(error) + b"0\r\n\r\n"]))

    return behave


@dataclass(slots=True)
class Size:
    """Of all that the gateway keeps. lengths: of each container, by its id. by_type: bytes."""

    entries: int = 0
    size: int = 0
    by_type: Counter[str] = field(default_factory=Counter)
    lengths: dict[int, int] = field(default_factory=dict)


def size_of(run: Running) -> Size:
    whole = Size()
    for found in kept(run):
        if isinstance(found, CONTAINERS):
            whole.entries += len(found)
            whole.lengths[id(found)] = len(found)
        whole.size += sys.getsizeof(found)
        whole.by_type[type(found).__qualname__] += sys.getsizeof(found)
    return whole


class Lengths:
    """Of each container, as often as somebody looks.

    What is full grows no more, or is emptied and grows again; what leaks grows each time, by however little. shrunk: the ids of
    those that have been longer.
    """

    def __init__(self, run: Running) -> None:
        self._held = {id(found): found for found in kept(run) if isinstance(found, CONTAINERS)}
        self._before = {key: len(found) for key, found in self._held.items()}
        self.shrunk = set[int]()

    def look(self) -> None:
        for key, found in self._held.items():
            if len(found) < self._before[key]:
                self.shrunk.add(key)
            self._before[key] = len(found)

    def leaks(self, sizes: Sequence[Size]) -> set[int]:
        """The ids of those that have grown each time."""
        first, last = sizes[0].lengths, sizes[-1].lengths
        common = set[int](last).intersection(*(one.lengths for one in sizes)) - self.shrunk
        return {
            key
            for key in common
            if last[key] - first[key] >= max(LEAK[0], LEAK[1] * last[key])
            and all(one.lengths[key] < then.lengths[key] for one, then in pairwise(sizes))
        }


def kept(run: Running) -> Iterator[object]:
    """Every object that can be reached from the gateway's parts and from its modules' variables."""
    todo: list[object] = [run.gateway]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("gateway", "router"):
            todo += vars(module).values()
    seen: set[int] = set()
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, OUTSIDE):
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, types.FunctionType):
            todo += [cell.cell_contents for cell in found.__closure__ or ()]
        else:
            todo += gc.get_referents(found)


async def flood(run: Running, names: Names, requests: int, clients: int = CLIENTS) -> None:
    async def client() -> None:
        for _ in range(requests // clients):
            await ask(run, names)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def ask(run: Running, names: Names) -> None:
    """One request, whatever comes of it."""
    body = names.body()
    leaves = names.chance.random() < names.trouble / 5
    if leaves:
        body["user"] = LEAVES
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            asyncio.timeout(names.chance.choice(LEAVES_S) if leaves else None),
            run.session.post(URL(run.url + names.path(), encoded=True), json=body, headers=names.headers()) as answer,
        ):
            await answer.read()


class Nowhere(io.BytesIO):
    """Where the request log goes."""

    def write(self, data: Any, /) -> int:
        return len(data)


@contextlib.asynccontextmanager
async def flooded(routing: Mapping[str, Any], replicas: Sequence[FakeReplica]) -> AsyncIterator[Running]:
    """A gateway of few places, which gives up soon."""
    config = {
        "listen": "127.0.0.1:0",
        "health": {"interval_s": 60},
        "timeouts": {"first_byte_s": 0.2},
        "routing": {"memory_mb": 1, **routing},
        "limits": {"drain_timeout_s": 1, **FORGETS_AT_ONCE},
        "prices": {"*": {"input": 1.0, "output": 1.0}},
        "pools": [
            {
                "replicas": [replica.url for replica in replicas],
                "models": ["*"],
                "resume_streams": True,
                "max_inflight": PLACES,
                "max_queue": CLIENTS - PLACES - 2,
                "queue_s": 0.03,
            }
        ],
    }
    with Nowhere() as nowhere:
        gateway = compose(load(None, config, env={}), RequestLog(LogOutput(nowhere.write), logging.INFO))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            yield run


CHATS = 'endpoint="/v1/chat/completions",model="*"'
# Samples of /metrics that show that a way was taken.
WAYS = [
    *(f'requests_total{{code="{code}",{CHATS}}}' for code in (200, 400, 404, 429, 499, 502, 504)),
    *(f'retries_total{{reason="{reason}"}}' for reason in ("refused", "reset", "status", "garbage")),
    *(f'admission_rejected_total{{pool="*",reason="{reason}"}}' for reason in ("queue_full", "queue_timeout")),
    *(f'resumed_streams_total{{model="*",result="{result}"}}' for result in ("good", "failed", "impossible")),
    f'ttft_seconds_count{{cache="miss",{CHATS}}}',
]


@uncompiled
@pytest.mark.parametrize("routing", [{}, {"policy": "sticky", "isolation": "tenant"}], ids=["cost", "sticky, isolated"])
@gate("sticky, isolated", reason="it has the tables of both")
async def test_a_flood_of_names_leaves_no_more_behind_than_the_tables_hold(routing: Mapping[str, Any]) -> None:
    clients, lists, answers = Names(1), Names(2), Names(3)
    behaves = [answers_anything(answers)]
    async with FakeReplica(behaves) as one, FakeReplica(behaves) as two, FakeReplica(behaves, port=free_port()) as away:
        replicas = one, two, away
        async with flooded(routing, replicas) as run:

            async def a_round(requests: int, asking: int = CLIENTS) -> None:
                for replica in replicas:
                    replica.listing = models(*(lists.name() for _ in range(200)))
                await run.gateway.fleet.probe_all(run.gateway.upstream)
                await away.stop()  # whoever is sent there is refused
                await flood(run, clients, requests, asking)
                await away.__aenter__()
                for replica in replicas:
                    replica.requests.clear()
                run.gateway.upstream.close()  # of idle connections there are as many as were used in 4 s
                run.gateway.router.sweep(run.gateway.clock())

            for number in range(MAX_NEW):  # the flood would take an hour to fill these tables
                run.gateway.router.sessions.answered(number, one.url, 1, run.gateway.clock())
            (twins,) = (found for found in kept(run) if isinstance(found, PromptTwins))
            for number in range(PROMPTS):
                twins.count(("*", number.to_bytes(8), 1), one.url, 1)
            for interrupted in (found for found in kept(run) if isinstance(found, InterruptedAnswers)):
                for number in range(MAX_KNOWN):
                    interrupted.add(number, one.url, 1.0, 0, run.gateway.clock())
            lengths = Lengths(run)
            for _ in range(FILLING):
                await a_round(FILL, PLACES)
                lengths.look()
            clients.trouble = answers.trouble = 0.3
            sizes = list[Size]()
            for number in range(FULL + FLOOD):
                clients.long = lists.long = answers.long = LENGTHS[number >= FULL]
                await a_round(REQUESTS)
                gc.collect()
                sizes.append(size_of(run))
                lengths.look()
            leaks = lengths.leaks(sizes[FULL - 1 :])
            grew = [repr(found)[:300] for found in kept(run) if id(found) in leaks] if leaks else []
            metrics = await run.metrics()
    assert not [way for way in WAYS if not metrics.get(f"warmroute_{way}")], "the flood reached everything"
    endpoints = {found for name in metrics for found in re.findall(r'endpoint="([^"]*)"', name)}
    assert endpoints == {"/v1/chat/completions", "other"}
    assert not grew
    assert len(twins) <= PROMPTS
    full, then = sizes[:FULL], sizes[FULL:]
    grown = (then[-1].by_type - full[-1].by_type).most_common(10)
    assert max(each.entries for each in then) <= max(each.entries for each in full) + SLACK[0], grown
    assert max(each.size for each in then) <= max(each.size for each in full) + SLACK[1], grown
