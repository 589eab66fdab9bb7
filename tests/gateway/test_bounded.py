"""Whatever clients and replicas name, the gateway remembers no more than so much of it.

A walk over all that a running gateway keeps, from its composition root and from its modules, before and after a flood of random
names through the real way of a request: models behind a "*" pool, salts, sessions, tenants, keys, request ids, priorities,
paths, header names; and from the replica's side: models in its list, statuses, headers, counts.
"""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gateway.app import compose, make_runner
from gateway.config import load
from gateway.request_log import Output, RequestLog
from tests.compiled import uncompiled
from tests.fakes import Behaviour, FakeReplica, FakeRequest, http, models, usage
from tests.gateway.conftest import Running, serving_runner

# What is full after the first rounds must not grow in the last ones, which bring other names, and longer ones.
REQUESTS, FILL, FLOOD = 300, 8, 4  # of a round; rounds
CLIENTS = 10
SLACK = 600, 400_000  # entries and bytes: some tables are emptied when they are full, so that their size goes up and down
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


class Names:
    """Random names, a few of them long."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.long = LENGTHS[0]

    def name(self, most: int = 1 << 20) -> str:
        """Of at most so many letters."""
        length = min(most, self.long) if self.chance.random() < 0.1 else self.chance.randint(8, 20)
        return self.chance.randbytes(length // 2).hex()

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name(256),
            "messages": [{"role": "user", "content": self.chance.randbytes(500).hex()}],
            "cache_salt": self.name(),
            "user": self.name(),
            self.name(): self.name(),
        }
        if self.chance.random() < 0.3:
            body["stream"] = True
        return body

    def headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self.name(1000)}",
            "X-Tenant-Id": self.name(1000),
            "X-Session-Id": self.name(1000),
            "X-Request-Id": self.name(1000),
            "X-Priority": str(self.chance.randrange(-(10**9), 10**9)) if self.chance.random() < 0.2 else "0",
            f"X-{self.name(1000)}": self.name(1000),
        }

    def path(self) -> str:
        if self.chance.random() < 0.7:
            return "/v1/chat/completions"
        return f"/v1/{self.name(1000)}"


def answers_anything(names: Names) -> Behaviour:
    """A good answer with names and counts of its own, or any status."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        chance = names.chance
        counts = usage(chance.randrange(1, 5000), 1, chance.choice([None, 0, 10]))
        body = json.dumps({"id": names.name(), "model": names.name(), "choices": [], "usage": counts}).encode()
        status = 200 if chance.random() < 0.7 else chance.choice([400, 404, 422])
        writer.write(http(status, body, "application/json", f"X-{names.name(1000)}: {names.name(1000)}"))

    return behave


def size_of(run: Running) -> tuple[int, int, Counter[str]]:
    """(entries of all containers, bytes, bytes by type) of what the gateway keeps."""
    entries = size = 0
    by_type = Counter[str]()
    for found in kept(run):
        if isinstance(found, dict | list | set | tuple):
            entries += len(found)
        size += sys.getsizeof(found)
        by_type[type(found).__qualname__] += sys.getsizeof(found)
    return entries, size, by_type


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


async def flood(run: Running, names: Names) -> None:
    async def client() -> None:
        for _ in range(REQUESTS // CLIENTS):
            await run.post(names.body(), names.path(), headers=names.headers())

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())


class Nowhere(io.BytesIO):
    """Where the request log goes."""

    def write(self, data: Any, /) -> int:
        return len(data)


@uncompiled
async def test_a_flood_of_names_leaves_no_more_behind_than_the_tables_hold() -> None:
    clients, lists, answers = Names(1), Names(2), Names(3)
    with Nowhere() as nowhere:
        async with FakeReplica(script=[answers_anything(answers)]) as replica:
            config = {
                "listen": "127.0.0.1:0",
                "health": {"interval_s": 60},
                "routing": {"memory_mb": 1},
                "limits": {"drain_timeout_s": 1},
                "prices": {"*": {"input": 1.0, "output": 1.0}},
                "pools": [{"replicas": [replica.url], "models": ["*"]}],
            }
            gateway = compose(load(None, config, env={}), RequestLog(Output(nowhere.write), logging.INFO))
            async with serving_runner(gateway, make_runner(gateway)) as run:
                sizes = []
                for number in range(FILL + FLOOD):
                    clients.long = lists.long = answers.long = LENGTHS[number >= FILL]
                    replica.listing = models(*(lists.name() for _ in range(300)))
                    await gateway.fleet.probe_all(gateway.relay)
                    await flood(run, clients)
                    replica.requests.clear()
                    gateway.router.sweep(gateway.clock())
                    gc.collect()
                    sizes.append(size_of(run))
    full, then = sizes[:FILL], sizes[FILL:]
    grown = (then[-1][2] - full[-1][2]).most_common(10)
    assert max(entries for entries, _, _ in then) <= max(entries for entries, _, _ in full) + SLACK[0], grown
    assert max(size for _, size, _ in then) <= max(size for _, size, _ in full) + SLACK[1], grown
