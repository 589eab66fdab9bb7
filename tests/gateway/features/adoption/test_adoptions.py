"""Requests that are sent again after their client has left: they get the answer that still runs, and it is computed once.

Whoever leaves is noticed by the gateway (`left`) before the next request is sent, so no test depends on an order of events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.memory import Budget
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import DIALECTS
from gateway.features.adoption.adoptions import Adoptions, grace_s
from gateway.features.adoption.interrupted import MAX_KNOWN, TTL_S, InterruptedAnswers
from gateway.features.adoption.kept_answer import AT_ONCE, STEP, UNCHARGED, Abandonments, KeptAnswer, KeptAnswers
from gateway.features.deadlines.deadlines import DEADLINE_OF, Deadlines
from gateway.features.keys.keys import Keys
from gateway.features.runs.detached_answer import DetachedAnswer, FollowerGate
from gateway.features.runs.event_log import Logs
from gateway.features.runs.places import RunPlaces
from gateway.request.exchange import Exchange
from gateway.request.record import new_record
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource
from router import Router
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.deadlines.test_deadlines import expired
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.gateway.features.prompt_log.kept import told_in
from tests.gateway.features.translation.test_translation import chat_only
from tests.gateway.request.test_dialects import CHAT, MESSAGES, RESPONSES, events, message, response
from tests.gateway.request.test_pulses import BODIES, COMPLETION, PING, STREAMS, once
from tests.gateway.request.test_robust import dial, post, read_answer
from tests.support.compiled import uncompiled
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    event,
    http,
    models,
    status,
    streams,
    writes,
)
from tests.support.in_memory import BytesReply, BytesRequest

LONG: dict[str, Any] = {"limits": {"adopt_s": 3600, "drain_timeout_s": 1}}
BRIEF: dict[str, Any] = {"limits": {"adopt_s": 0.05, "drain_timeout_s": 1}}
TEXT = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": "hello"}]}
PLAIN: dict[str, Behaviour] = {
    CHAT: answers("hello"),
    COMPLETION: writes(http(200, json.dumps(TEXT).encode())),
    MESSAGES: message(),
    RESPONSES: writes(http(200, json.dumps(response()).encode())),
}
Lines = Callable[[], list[dict[str, Any]]]
ALL = [(path, stream) for path in BODIES for stream in (True, False)]


def body_of(path: str, *, stream: bool = True, **more: Any) -> bytes:
    return json.dumps({**BODIES[path], "stream": stream, **more}).encode()


def sent(path: str, body: bytes, *lines: bytes) -> bytes:
    return post(body, b"Content-Type: application/json", *lines, path=path.encode())


def adoptions(run: Running) -> Adoptions:
    return run.gateway[Adoptions]


@contextlib.asynccontextmanager
async def closing(run: Running) -> AsyncIterator[None]:
    """At the end no answer waits."""
    try:
        yield
    finally:
        adoptions(run).close()


@contextlib.asynccontextmanager
async def patient(*replicas: FakeReplica, **config: Any) -> AsyncIterator[Running]:
    """A gateway whose graces last longer than any test."""
    async with running(*replicas, **LONG, **config) as run, closing(run):
        yield run


async def left(run: Running, count: int = 1) -> None:
    """The gateway has noticed that these clients have left."""
    await eventually(lambda: adoptions(run).answers.waiting == count)


async def asks_and_leaves(run: Running, data: bytes, until: Callable[[], object], size: int = 0, waiting: int = 1) -> bytes:
    """A client that leaves once `until` holds and it has read that many bytes."""
    async with dial(run) as (reader, writer):
        writer.write(data)
        await eventually(until)
        read = await reader.readexactly(size)
    await left(run, waiting)
    return read


async def gets(run: Running, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with dial(run) as (reader, writer):
        writer.write(data)
        return await read_answer(reader)


async def abandoned(run: Running) -> dict[str, float]:
    """Abandoned answers by what became of them."""
    name = "warmroute_abandoned_answers_total{"
    return {key.split('"')[1]: value for key, value in (await run.metrics()).items() if key.startswith(name) and value}


def nothing_is_held(run: Running) -> bool:
    all_ = adoptions(run)
    return (all_.answers.held, all_.answers.waiting, all_.places.taken, len(all_.logs)) == (0, 0, 0, 0)


def without_pulses(path: str, data: bytes) -> bytes:
    parts = [part + b"\n\n" for part in data.split(b"\n\n") if part]
    return b"".join(part for part in parts if not part.startswith(b": ") and part != PING)


# -- what a client gets that comes again


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_request_that_comes_again_during_the_prefill_gets_its_answer(
    path: str, stream: bool, request_lines: Lines
) -> None:
    go = asyncio.Event()
    engine = events(*STREAMS[path]) if stream else PLAIN[path]
    async with FakeReplica([once(go, engine), engine]) as replica, patient(replica) as run:
        body = body_of(path, stream=stream)
        await asks_and_leaves(run, sent(path, body, b"X-Request-Id: first"), lambda: replica.requests)
        second = asyncio.create_task(gets(run, sent(path, body, b"X-Request-Id: second", b"X-Stainless-Retry-Count: 1")))
        await left(run, 0)
        go.set()
        status, headers, data = await second
        assert (status, headers["x-request-id"], len(replica.requests)) == (200, "second", 1)
        await eventually(lambda: len(request_lines()) == 2)
        metered = await run.metrics()
        other = await gets(run, sent(path, body))
        assert (other[2], len(replica.requests)) == (data, 2), "as an answer that nobody has adopted"
        assert other[1]["content-type"] == headers["content-type"]
        first, again = sorted(request_lines()[:2], key=lambda line: str(line["id"]))
        assert (first["status"], first.get("adopted"), again["status"], again["adopted"]) == (200, None, 200, "first")
        assert (again["replica"], again["completion_tokens"]) == ("", None), "the generation has a record of its own"
        requests = {key: value for key, value in metered.items() if key.startswith("warmroute_completion_tokens_total")}
        assert sum(requests.values()) == (first["completion_tokens"] or 0)
        assert await abandoned(run) == {"adopted": 1}
        await eventually(lambda: nothing_is_held(run))


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_told_from_its_beginning(path: str) -> None:
    go = asyncio.Event()
    parts = STREAMS[path]

    async def engine(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(parts[0]))
        await writer.drain()
        await go.wait()
        writer.write(b"".join(map(chunk, parts[1:])) + b"0\r\n\r\n")

    async with FakeReplica([engine]) as replica, patient(replica) as run:
        data = sent(path, body_of(path))
        read = await asks_and_leaves(run, data, lambda: replica.requests, 200)
        assert read.startswith(b"HTTP/1.1 200 OK")
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        assert (await again)[2] == b"".join(parts)
        assert len(replica.requests) == 1


async def test_a_client_that_leaves_again_and_again_gets_it_in_the_end(request_lines: Lines) -> None:
    """As an agent does that leaves every 300 s, of a prefill of 25 minutes."""
    go = asyncio.Event()
    async with FakeReplica([once(go, events(*STREAMS[MESSAGES]))]) as replica, patient(replica) as run:
        data = sent(MESSAGES, body_of(MESSAGES))
        await asks_and_leaves(run, data, lambda: replica.requests)
        for _ in range(4):
            await asks_and_leaves(run, data, lambda: not adoptions(run).answers.waiting)
        last = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        assert (await last)[2] == b"".join(STREAMS[MESSAGES])
        assert len(replica.requests) == 1
        await eventually(lambda: len(request_lines()) == 6)
        assert sorted(line["status"] for line in request_lines()) == [200, 200, 499, 499, 499, 499]
        assert await abandoned(run) == {"adopted": 5}
        await eventually(lambda: nothing_is_held(run))


async def test_a_client_that_leaves_in_the_queue_keeps_its_place() -> None:
    go, first = asyncio.Event(), body_of(CHAT, messages=[{"role": "user", "content": "first"}])
    async with FakeReplica([once(go, answers("one")), answers("two")]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 3600}]
        async with patient(replica, pools=pools) as run:
            busy = asyncio.create_task(gets(run, sent(CHAT, first)))
            await eventually(lambda: replica.requests)
            data = sent(CHAT, body_of(CHAT, stream=False))
            await asks_and_leaves(run, data, lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
            again = asyncio.create_task(gets(run, data))
            await left(run, 0)
            go.set()
            assert json.loads((await busy)[2])["choices"][0]["message"]["content"] == "one"
            assert json.loads((await again)[2])["choices"][0]["message"]["content"] == "two"
            assert len(replica.requests) == 2


async def test_an_answer_without_a_client_moves_to_another_replica() -> None:
    go = asyncio.Event()
    replicas = FakeReplica([once(go, dies)]), FakeReplica([once(go, dies)])
    async with replicas[0] as one, replicas[1] as other, patient(one, other) as run:
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: one.requests or other.requests)
        survivor = other if one.requests else one
        survivor.script = [streams("hel", "lo")]
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        status, _, body = await again
        assert (status, body.count(b'"hel"'), body.count(b"[DONE]")) == (200, 1, 1)
        assert len(survivor.requests) == 1


async def test_a_request_is_known_by_the_body_that_its_client_has_sent() -> None:
    """A fallback pool gets it with the name of another model. (Stored histories change it, too: `ALL` has Responses.)"""
    go = asyncio.Event()
    async with (
        FakeReplica([status(503)], listing=models("large")) as big,
        FakeReplica([once(go, answers("small"))], listing=models("little")) as small,
    ):
        pools = [
            {"name": "big", "models": ["large"], "replicas": [big.url], "fallback": {"pool": "small", "model": "little"}},
            {"name": "small", "models": ["little"], "replicas": [small.url]},
        ]
        async with patient(pools=pools) as run:
            data = sent(CHAT, body_of(CHAT, stream=False, model="large"))
            await asks_and_leaves(run, data, lambda: small.requests)
            again = asyncio.create_task(gets(run, data))
            await left(run, 0)
            go.set()
            assert json.loads((await again)[2])["choices"][0]["message"]["content"] == "small"
            assert [request.json["model"] for request in small.requests] == ["little"]


async def test_a_request_that_continues_a_log_is_known_by_its_own_body(tmp_path: Path) -> None:
    go = asyncio.Event()
    turn = {"messages": [{"role": "user", "content": "hi"}]}
    async with (
        FakeReplica([answers("hello"), once(go, answers("now"))]) as replica,
        patient(replica, state={"url": f"sqlite:///{tmp_path}/state.db"}) as run,
    ):
        _, headers, _ = await gets(run, sent(CHAT, body_of(CHAT, stream=False, **turn), b"Prompt-Log: keep"))
        base = b'Prompt-Log: base="%b"' % told_in({"Prompt-Log": headers["prompt-log"]})["head"].encode()
        data = sent(CHAT, body_of(CHAT, stream=False, **turn), base)
        await asks_and_leaves(run, data, lambda: len(replica.requests) == 2)
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        assert json.loads((await again)[2])["choices"][0]["message"]["content"] == "now"
        assert [len(request.json["messages"]) for request in replica.requests] == [1, 3]


async def test_a_translated_answer_is_adopted() -> None:
    go = asyncio.Event()
    async with FakeReplica([chat_only(once(go, streams("hel", "lo")))]) as replica, patient(replica) as run:
        data = sent(MESSAGES, body_of(MESSAGES))
        await asks_and_leaves(run, data, lambda: [each for each in replica.requests if each.path == CHAT])
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        status, _, body = await again
        assert (status, body.count(b"event: message_start"), body.count(b"event: message_stop")) == (200, 1, 1)
        assert [each.path for each in replica.requests].count(CHAT) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_signs_of_life_go_on_for_the_client_that_comes_again(path: str) -> None:
    go, often = asyncio.Event(), {"limits": {**LONG["limits"], "keepalive_s": 0.02}}
    async with FakeReplica([once(go, events(*STREAMS[path]))]) as replica, running(replica, **often) as run:
        data = sent(path, body_of(path))
        async with dial(run) as (reader, writer):
            writer.write(data)
            await reader.readuntil(b"\r\n\r\n")
        await left(run)
        async with dial(run) as (reader, writer):
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            pulses = PING if path == MESSAGES else b": computing"
            for _ in range(3):
                await reader.readuntil(pulses)
            go.set()
            rest = await reader.readuntil(b"0\r\n\r\n")
        assert b" 200 OK" in head
        events_ = b"".join(without_pulses(path, rest).split(b"\r\n"))
        assert all(line in events_ for part in STREAMS[path] for line in part.split(b"\n") if line)
        assert len(replica.requests) == 1


@pytest.mark.parametrize("begun", [True, False])
async def test_the_deadline_of_a_client_that_has_left_is_none_for_the_next_one(begun: bool) -> None:
    go = asyncio.Event()
    async with FakeReplica([tokens_of(3, go, int(begun))]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT), b"X-Request-Timeout: 3600")
        await asks_and_leaves(run, data, lambda: replica.requests, 20 if begun else 0)
        (answer,) = adoptions(run)._waiting.values()
        deadline, exchange = DEADLINE_OF.get(answer.record), answer.kept.exchange
        assert deadline is not None
        assert exchange is not None
        assert answer.task is not None
        again = asyncio.create_task(gets(run, sent(CHAT, body_of(CHAT), b"X-Request-Timeout: 7200")))
        await left(run, 0)
        run.gateway[Deadlines]._expire(exchange, deadline, answer.task)  # the time of the first client is over
        go.set()
        status, _, body = await again
        assert (status, DONE in body, len(replica.requests)) == (200, True, 1)


@pytest.mark.parametrize("begun", [True, False])
async def test_the_deadline_of_the_client_that_adopts_ends_the_generation(begun: bool, request_lines: Lines) -> None:
    async with FakeReplica([tokens_of(3, asyncio.Event(), int(begun))]) as replica, patient(replica) as run:
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT)), lambda: replica.requests, 20 if begun else 0)
        async with dial(run) as (reader, writer):
            writer.write(sent(CHAT, body_of(CHAT), b"X-Request-Timeout: 3600", b"Connection: close"))
            head = await reader.readuntil(b"token 0 ") if begun else b""
            await expired(run, lambda: not adoptions(run).answers.waiting)
            data = head + await reader.read()
        assert (data[:12], b"deadline_exceeded" in data) == (b"HTTP/1.1 200" if begun else b"HTTP/1.1 504", True)
        await eventually(lambda: replica.gone == 1)
        await eventually(lambda: nothing_is_held(run))
        assert len(replica.requests) == 1
    (line,) = [line for line in request_lines() if line.get("adopted")]
    assert line["code"] == "deadline_exceeded"


async def test_an_invalid_deadline_adopts_nothing() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, patient(replica) as run:
        data = body_of(CHAT, stream=False)
        await asks_and_leaves(run, sent(CHAT, data), lambda: replica.requests)
        assert (await gets(run, sent(CHAT, data, b"X-Request-Timeout: 0")))[0] == 400
        await left(run)
        go.set()
        assert (await gets(run, sent(CHAT, data)))[0] == 200
        assert len(replica.requests) == 1


async def test_an_error_of_the_replica_is_for_the_client_that_waits_for_it() -> None:
    go = asyncio.Event()
    refusal = writes(http(400, b'{"error":{"message":"no such tool"}}'))
    async with FakeReplica([once(go, refusal), answers()]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        await asks_and_leaves(run, data, lambda: replica.requests)
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        status, _, body = await again
        assert (status, b"no such tool" in body, len(replica.requests)) == (400, True, 1)
        await eventually(lambda: nothing_is_held(run))


async def test_an_error_that_nobody_waits_for_is_not_told_again() -> None:
    go = asyncio.Event()
    refusal = writes(http(400, b'{"error":{"message":"no such tool"}}'))
    async with FakeReplica([once(go, refusal), answers()]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        await asks_and_leaves(run, data, lambda: replica.requests)
        go.set()
        await left(run, 0)
        assert ((await gets(run, data))[0], len(replica.requests)) == (200, 2)
        assert await abandoned(run) == {"failed": 1}
        await eventually(lambda: nothing_is_held(run))


@pytest.mark.parametrize("begun", [True, False])
async def test_a_stream_that_breaks_off_without_a_client_is_not_told_again(begun: bool) -> None:
    """It ends with an error event of the gateway, like a whole answer."""
    go, die = asyncio.Event(), streams("hel", die=True)
    script = [once(go, die) if not begun else streams("hel", hold=go, die=True), answers()]
    async with FakeReplica(script) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: replica.requests, size=200 if begun else 0)
        go.set()
        await left(run, 0)
        assert await abandoned(run) == {"failed": 1}
        await eventually(lambda: nothing_is_held(run))


async def test_a_stream_that_breaks_off_is_an_error_of_the_client_that_follows_it(request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([streams("hel", hold=go, die=True)]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: replica.requests, size=200)
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        body = (await again)[2]
        assert (body.count(b'"hel"'), body.count(b"replica_failed")) == (1, 1)
        await eventually(lambda: len(request_lines()) == 2)
        assert all(line["error"] for line in request_lines())
        await eventually(lambda: nothing_is_held(run))


async def test_an_answer_that_has_ended_waits_for_its_client(request_lines: Lines) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, streams("hel", "lo"))]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: replica.requests)
        go.set()
        await eventually(request_lines)
        assert (request_lines()[0]["status"], request_lines()[0]["error"]) == (499, "the client left")
        assert (await gets(run, data))[2].endswith(DONE)
        assert len(replica.requests) == 1
        await eventually(lambda: nothing_is_held(run))


async def test_an_answer_that_has_ended_waits_for_longer() -> None:
    """OpenCode comes again after 2, 4 and 8 s."""
    go = asyncio.Event()
    config: dict[str, Any] = {"limits": {"adopt_s": 30, "drain_timeout_s": 1}}
    async with FakeReplica([once(go, streams("hel", "lo"))]) as replica, running(replica, **config) as run, closing(run):
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT)), lambda: replica.requests)
        (answer,) = adoptions(run)._waiting.values()
        running_grace = answer.timer
        assert running_grace is not None
        go.set()
        await eventually(lambda: answer.task is None)
        assert answer.timer is not None
        assert running_grace.cancelled()
        assert answer.timer.when() > running_grace.when() + 20


async def test_an_answer_that_has_ended_leaves_its_place_to_one_that_runs() -> None:
    never = asyncio.Event()
    async with (
        FakeReplica([streams("hel", "lo", hold=(go := asyncio.Event())), once(never, answers())]) as replica,
        patient(replica) as run,
    ):
        adoptions(run).places = RunPlaces(100, 1)
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT, seed=1)), lambda: replica.requests)
        go.set()
        (ended,) = adoptions(run)._waiting.values()
        await eventually(lambda: ended.task is None)
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT, seed=2)), lambda: len(replica.requests) == 2)
        await eventually(lambda: ended not in adoptions(run)._waiting.values())
        assert (await abandoned(run), adoptions(run).answers.waiting) == ({"expired": 1}, 1)


async def test_an_answer_that_has_ended_leaves_its_place_to_its_owner_at_another_address() -> None:
    """A key is used on many machines."""
    async with FakeReplica([streams("hel", "lo", hold=(go := asyncio.Event()))]) as replica, patient(replica) as run:
        places = adoptions(run).places = RunPlaces(100, 1)
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT)), lambda: replica.requests)
        (answer,) = adoptions(run)._waiting.values()
        other = (answer.place[0], "192.0.2.1")
        assert not adoptions(run)._admit(other), "it runs"
        go.set()
        await eventually(lambda: answer.task is None)
        assert adoptions(run)._admit(other)
        places.release(*other)
        assert nothing_is_held(run)


async def test_an_answer_whose_log_has_made_room_for_others_is_generated_again() -> None:
    go = asyncio.Event()
    async with FakeReplica([streams("hel", "lo", hold=go), answers("again")]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: replica.requests)
        go.set()
        (ended,) = adoptions(run)._waiting.values()
        await eventually(lambda: ended.task is None)
        adoptions(run).logs.forget(ended.log_key)
        status_, _, body = await gets(run, data)
        assert (status_, b"again" in body, await abandoned(run)) == (200, True, {"too_large": 1}), body
        assert nothing_is_held(run)


# -- what nobody adopts


async def test_an_answer_that_nobody_adopts_is_cancelled(request_lines: Lines) -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers()), answers()]) as replica, running(replica, **BRIEF) as run:
        data = sent(CHAT, body_of(CHAT))
        async with dial(run) as (_, writer):
            writer.write(data)
            await eventually(lambda: replica.requests)
        await eventually(lambda: replica.gone == 1)
        await eventually(request_lines)
        assert (request_lines()[0]["status"], request_lines()[0]["error"]) == (499, "the client left")
        assert await abandoned(run) == {"expired": 1}
        await eventually(lambda: nothing_is_held(run))


@pytest.mark.parametrize(
    ("session", "text", "ends"),
    [("s1", "first, ", True), ("s2", "first, ", False), ("s1", "other, ", False)],
    ids=["goes on", "another session", "another prompt"],
)
async def test_an_answer_ends_when_its_session_goes_on(session: str, text: str, ends: bool) -> None:
    """Claude Code keeps the whole blocks of an answer that was cut, and asks for the rest."""
    never = asyncio.Event()
    first = [{"role": "user", "content": "first, " * 2000}]
    later = [
        {"role": "user", "content": text * 2000},
        {"role": "assistant", "content": "so far"},
        {"role": "user", "content": "go on"},
    ]
    async with FakeReplica([once(never, answers()), events(*STREAMS[MESSAGES])]) as replica, patient(replica) as run:
        data = sent(MESSAGES, body_of(MESSAGES, messages=first), b"X-Claude-Code-Session-Id: s1")
        await asks_and_leaves(run, data, lambda: replica.requests)
        other = sent(MESSAGES, body_of(MESSAGES, messages=later), b"X-Claude-Code-Session-Id: " + session.encode())
        assert (await gets(run, other))[0] == 200
        assert await abandoned(run) == ({"continued": 1} if ends else {})
        if ends:
            await eventually(lambda: replica.gone == 1)
            await eventually(lambda: nothing_is_held(run))


async def test_a_grace_of_zero_is_none() -> None:
    never = asyncio.Event()
    off = {"adopt_s": 0, "drain_timeout_s": 1}
    async with FakeReplica([once(never, answers())]) as replica, running(replica, limits=off) as run:
        async with dial(run) as (_, writer):
            writer.write(sent(CHAT, body_of(CHAT)))
            await eventually(lambda: replica.requests)
        await eventually(lambda: replica.gone == 1)
        with pytest.raises(KeyError):
            adoptions(run)


def test_a_grace_grows_with_what_was_computed() -> None:
    assert [grace_s(5, spent_s) for spent_s in (0, 100, 300, 550, 10_000)] == [5, 15, 35, 60, 60]
    assert grace_s(120, 1000) == 120
    assert [grace_s(5, 10, pause_s) for pause_s in (0, 2, 4, 8, 16, 32)] == [6, 12, 18, 30, 54, 60]


async def test_a_grace_is_longer_for_a_client_that_has_come_again() -> None:
    """Agents double their pauses."""
    never = asyncio.Event()
    config: dict[str, Any] = {"limits": {"adopt_s": 30, "drain_timeout_s": 1}}
    async with FakeReplica([once(never, answers())]) as replica, running(replica, **config) as run, closing(run):
        data = sent(CHAT, body_of(CHAT))
        await asks_and_leaves(run, data, lambda: replica.requests)
        (answer,) = adoptions(run)._waiting.values()
        first = answer.timer
        assert first is not None
        answer.left_at -= 10
        await asks_and_leaves(run, data, lambda: not adoptions(run).answers.waiting)
        assert answer.timer is not None
        assert answer.timer.when() > first.when() + 20


@pytest.mark.parametrize(("tokens", "goes"), [(100, True), (10_000_000, False)])
async def test_a_request_whose_prefill_was_interrupted_goes_there_again_if_that_is_cheapest(tokens: int, goes: bool) -> None:
    """Another prompt of the same size goes to the replica with less work."""
    never = asyncio.Event()
    another = body_of(CHAT, stream=False, messages=[{"role": "user", "content": "ho " * 300}])
    replicas = FakeReplica([once(never, answers())]), FakeReplica([once(never, answers())])
    async with replicas[0] as one, replicas[1] as two, patient(one, two) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        await asks_and_leaves(run, data, lambda: one.requests or two.requests)
        first, second = (one, two) if one.requests else (two, one)
        first.script = second.script = [answers()]
        adoptions(run).close()
        await eventually(lambda: first.gone == 1 and nothing_is_held(run))
        known = adoptions(run).interrupted._known
        (identity,) = known
        known[identity] = known[identity]._replace(computed_s=3600.0)
        work = run.gateway.router.ledger.open(first.name, tokens, tokens, run.gateway.clock())
        assert (await gets(run, sent(CHAT, another)))[0] == 200
        assert (len(first.requests), len(second.requests)) == (1, 1)
        assert (await gets(run, data))[0] == 200
        assert (len(first.requests), len(second.requests), len(known)) == ((2, 1, 0) if goes else (1, 2, 0))
        work.close(run.gateway.clock())


def test_known_interrupted_answers_are_bounded() -> None:
    """In number and in time."""
    known = InterruptedAnswers(Router(policy="cost", ttl_s=1e6, memory_bytes=1 << 20, chance=random.Random(1)))
    for number in range(MAX_KNOWN + 5):
        known.add(number, "a", 1.0, 0, 0.0)
    assert len(known) == MAX_KNOWN
    known.add(-1, "a", 1.0, 0, TTL_S)
    assert len(known) == 1


async def test_no_prefill_is_interrupted_after_its_first_token() -> None:
    never = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=never)]) as replica, patient(replica) as run:
        loads = run.gateway.router.ledger.loads
        await asks_and_leaves(
            run, sent(CHAT, body_of(CHAT, stream=True)), lambda: any(load.decoding for load in loads.values())
        )
        adoptions(run).close()
        await eventually(lambda: nothing_is_held(run))
        assert [known.computed_s for known in adoptions(run).interrupted._known.values()] == [0.0]


@pytest.mark.parametrize("stream", [False, True])  # before, and after its first token
async def test_a_client_that_comes_after_the_grace_gets_a_longer_one(stream: bool) -> None:
    never = asyncio.Event()
    async with (
        FakeReplica([streams("a", hold=never) if stream else once(never, answers())]) as replica,
        patient(replica) as run,
    ):
        data = sent(CHAT, body_of(CHAT, stream=stream))
        for number in range(3):
            asked, loads = number + 1, run.gateway.router.ledger.loads
            await asks_and_leaves(
                run,
                data,
                lambda: len(replica.requests) == asked and (not stream or any(load.decoding for load in loads.values())),  # noqa: B023
            )
            (answer,) = adoptions(run)._waiting.values()
            assert answer.pause_s >= number
            answer.left_at -= asked
            adoptions(run)._give_up(answer, "expired")
            await eventually(lambda: nothing_is_held(run))


OTHERS: dict[str, tuple[bytes, ...]] = {
    "key": (b"Authorization: Bearer other",),
    "tenant": (b"X-Tenant-Id: other",),
    "header for the replica": (b"Anthropic-Beta: other",),
}


@pytest.mark.parametrize("lines", OTHERS.values(), ids=OTHERS)
async def test_the_request_of_another_caller_is_another_one(lines: tuple[bytes, ...]) -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers()), answers("mine")]) as replica, patient(replica) as run:
        body = body_of(CHAT, stream=False)
        await asks_and_leaves(run, sent(CHAT, body, b"Authorization: Bearer one"), lambda: replica.requests)
        own = lines if lines[0].startswith(b"Authorization") else (b"Authorization: Bearer one", *lines)
        status, _, answer = await gets(run, sent(CHAT, body, *own))
        assert (status, b"mine" in answer, len(replica.requests)) == (200, True, 2)
        assert adoptions(run).answers.waiting == 1


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (CHAT, body_of(CHAT, stream=False, seed=1)),
        (CHAT, body_of(CHAT, stream=False) + b" "),
        (f"{CHAT}?more=1", body_of(CHAT, stream=False)),
    ],
)
async def test_another_body_or_query_is_another_request(path: str, other: bytes) -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers()), answers("mine")]) as replica, patient(replica) as run:
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT, stream=False)), lambda: replica.requests)
        assert b"mine" in (await gets(run, sent(path, other)))[2]
        assert len(replica.requests) == 2


def of_codex(**metadata: str) -> bytes:
    """A body with its metadata at the end."""
    return b'%b,"client_metadata":%b}' % (body_of(RESPONSES)[:-1], json.dumps(metadata, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("other", "generations"),
    [
        (of_codex(turn="1", window='{"a": {}}'), 1),
        (of_codex(window='{"a": {}}', turn="1"), 1),
        (of_codex(window='{"a": {}}', turn="2"), 2),
        (of_codex(window='{"a": {}}', turn="1")[:-1] + b"]", 2),
    ],
)
async def test_codex_repeats_a_stream_with_its_metadata_in_another_order(other: bytes, generations: int) -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, events(*STREAMS[RESPONSES]))]) as replica, patient(replica) as run:
        await asks_and_leaves(run, sent(RESPONSES, of_codex(turn="1", window='{"a": {}}')), lambda: replica.requests)
        go.set()
        status, _, _ = await gets(run, sent(RESPONSES, other))
        assert (status, len(replica.requests)) in ((200, generations), (400, 1))


async def test_connected_clients_with_one_body_have_a_generation_each() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        clients = [asyncio.create_task(gets(run, data)) for _ in range(20)]
        await eventually(lambda: len(replica.requests) == 20)
        go.set()
        assert {(await each)[0] for each in clients} == {200}
        assert await abandoned(run) == {}


@pytest.mark.parametrize(("path", "stream"), ALL)
async def test_a_request_that_comes_before_its_client_has_left_gets_the_older_generation(
    path: str, stream: bool, request_lines: Lines
) -> None:
    """The end of the first connection arrives late, after the second request has reached a replica."""
    go = asyncio.Event()
    engine = events(*STREAMS[path]) if stream else PLAIN[path]
    async with FakeReplica([once(go, engine)]) as replica, patient(replica) as run:
        data = sent(path, body_of(path, stream=stream))
        async with dial(run) as (_, first):
            first.write(sent(path, body_of(path, stream=stream), b"X-Request-Id: first"))
            await eventually(lambda: len(replica.requests) == 1)
            again = asyncio.create_task(gets(run, data))
            await eventually(lambda: len(replica.requests) == 2)
            assert replica.gone == 0, "two connected clients have a generation each"
            first.close()
            await eventually(lambda: replica.gone == 1)
        load = run.gateway.router.ledger.loads[next(iter(run.gateway.router.ledger.loads))]
        assert load.inflight == 1, "the booking of the second one is released"
        go.set()
        assert (await again)[0] == 200
        alone = await gets(run, sent(path, body_of(path, stream=stream, seed=1)))
        assert (await again)[2] == alone[2]
        await eventually(lambda: len(request_lines()) == 3)
        first_line, line = (next(each for each in request_lines() if (each["id"] == "first") is own) for own in (True, False))
        assert (first_line["status"], line["status"], line["adopted"]) == (200, 200, "first")
        assert (line["replica"], line["reason"], line["completion_tokens"]) == ("", "", None)
        assert await abandoned(run) == {"adopted": 1}
        await eventually(lambda: nothing_is_held(run))


@pytest.mark.parametrize(("leave", "stay"), [((1, 0), (2, 3)), ((0, 2), (1,))])
async def test_those_that_leave_at_once_are_handed_over(leave: tuple[int, int], stay: tuple[int, ...]) -> None:
    """The younger one first: the older one must not end it in favour of itself. Or one that has just been given the answer."""
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, patient(replica) as run:
        data, clients = sent(CHAT, body_of(CHAT, stream=False)), dict[int, asyncio.Task[tuple[int, dict[str, str], bytes]]]()
        async with contextlib.AsyncExitStack() as stack:
            for number in range(len(leave) + len(stay)):
                if number in stay:
                    clients[number] = asyncio.create_task(gets(run, data))
                else:
                    (await stack.enter_async_context(dial(run)))[1].write(data)
                await eventually(lambda n=number: len(replica.requests) == n + 1)
            begun = sorted(run.gateway.running.exchanges, key=lambda exchange: exchange.record.begun)
            for exchange in [begun[number] for number in leave]:  # in one turn of the loop
                assert isinstance(exchange.request, HttpRequest)
                transport = exchange.request.connection.transport
                assert transport is not None
                transport.abort()
        await eventually(lambda: replica.gone == 2)
        go.set()
        assert [(await each)[0] for each in clients.values()] == [200 for _ in stay]
        assert await abandoned(run) == {"adopted": len(stay)}
        await eventually(lambda: nothing_is_held(run))


async def test_a_request_that_waits_in_the_queue_gets_the_older_generation() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica:
        pools = [{"replicas": [replica.url], "max_inflight": 1, "queue_s": 3600}]
        async with patient(replica, pools=pools) as run:
            admission, data = run.gateway.fleet.pools[0].admission, sent(CHAT, body_of(CHAT, stream=False))
            async with dial(run) as (_, first):
                first.write(data)
                await eventually(lambda: len(replica.requests) == 1)
                again = asyncio.create_task(gets(run, data))
                await eventually(lambda: admission.waiting == 1)
            await eventually(lambda: admission.waiting == 0)
            go.set()
            assert (await again)[0] == 200
            assert (len(replica.requests), replica.gone) == (1, 0)
            await eventually(lambda: nothing_is_held(run))


async def test_who_comes_together_adopts_one_each() -> None:
    """Two have left, three come."""
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        await asks_and_leaves(run, data, lambda: len(replica.requests) == 1)
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT, stream=False, seed=1)), lambda: len(replica.requests) == 2, 0, 2)
        clients = [asyncio.create_task(gets(run, data)) for _ in range(3)]
        await eventually(lambda: len(replica.requests) == 4)
        go.set()
        assert {(await each)[0] for each in clients} == {200}
        assert await abandoned(run) == {"adopted": 1}


async def test_of_equal_requests_without_a_client_the_oldest_goes_on() -> None:
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT, stream=False))
        async with contextlib.AsyncExitStack() as stack:
            writers = [(await stack.enter_async_context(dial(run)))[1] for _ in range(20)]
            for number, writer in enumerate(writers):
                writer.write(data)
                await eventually(lambda n=number: len(replica.requests) == n + 1)
            (oldest, *_) = sorted(run.gateway.running.exchanges, key=lambda exchange: exchange.record.begun)
            for number in (7, 3, *(n for n in range(20) if n not in (3, 7))):  # some of them before an older one
                writers[number].close()
        await eventually(lambda: replica.gone == 19)
        await left(run)
        assert waiting_ids(run) == {oldest.record.id}
        go.set()
        assert (await gets(run, data))[0] == 200
        assert len(replica.requests) == 20
        await eventually(lambda: nothing_is_held(run))


async def test_a_second_one_renews_the_grace_of_the_first() -> None:
    """Its client leaves after the first bytes of an answer of its own, which nobody else gets."""
    never = asyncio.Event()

    async def begins(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(STREAMS[CHAT][0]))
        await never.wait()

    async with FakeReplica([once(never, answers()), begins]) as replica, patient(replica) as run:
        data = sent(CHAT, body_of(CHAT))
        async with dial(run) as (_, writer), dial(run) as (reader, other):
            writer.write(data)
            await eventually(lambda: len(replica.requests) == 1)
            other.write(data)
            await reader.readuntil(b"\n\n")
            writer.close()
            await left(run)
            (answer,) = adoptions(run)._waiting.values()
            timer = answer.timer
        await eventually(lambda: replica.gone == 1)
        assert answer.timer is not None
        assert timer is not None
        assert timer.cancelled()
        assert answer.timer.when() >= timer.when()


async def test_a_key_that_was_revoked_adopts_nothing(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica, keyed(tmp_path, replica, **LONG) as run, closing(run):
        id_, key = await made(run)
        data = sent(CHAT, body_of(CHAT), b"Authorization: Bearer " + key.encode())
        await asks_and_leaves(run, data, lambda: replica.requests)
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}") as answer:
            assert answer.status == 200
        assert ((await gets(run, data))[0], len(replica.requests)) == (401, 1)


async def test_a_key_adopts_nothing_of_an_adapter_that_it_may_use_no_more(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica, keyed(tmp_path, replica, **LONG) as run, closing(run):
        id_, key = await made(run, models=["m", "m:adapter"])
        data = sent(CHAT, body_of(CHAT, lora_path="adapter"), b"Authorization: Bearer " + key.encode())
        await asks_and_leaves(run, data, lambda: replica.requests)
        async with run.session.patch(f"{run.admin_url}/warmroute/keys/{id_}", json={"models": ["m"]}) as answer:
            assert answer.status == 200
        assert ((await gets(run, data))[0], len(replica.requests)) == (403, 1)


async def test_another_key_of_the_same_tenant_adopts_nothing(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with (
        FakeReplica([once(never, answers()), answers()]) as replica,
        keyed(tmp_path, replica, **LONG) as run,
        closing(run),
    ):
        (_, one), (_, other) = await made(run), await made(run)
        body = body_of(CHAT, stream=False)
        await asks_and_leaves(run, sent(CHAT, body, b"Authorization: Bearer " + one.encode()), lambda: replica.requests)
        assert (await run.post(body, headers=bearer(other)))[0] == 200
        assert len(replica.requests) == 2


async def test_tokens_count_once_for_a_key(tmp_path: Path) -> None:
    """The reservation of the generation is kept, and the client that comes again needs none of its own."""
    go = asyncio.Event()
    async with FakeReplica([once(go, answers())]) as replica, keyed(tmp_path, replica, **LONG) as run, closing(run):
        _, key = await made(run, uncached_tokens_per_minute=400)
        line = b"Authorization: Bearer " + key.encode()
        data = sent(CHAT, body_of(CHAT, stream=False), line)
        await asks_and_leaves(run, data, lambda: replica.requests)
        again = asyncio.create_task(gets(run, data))
        await left(run, 0)
        go.set()
        assert (await again)[0] == 200
        await eventually(lambda: nothing_is_held(run))
        run.gateway[Keys].limiter.check()


async def test_a_shutdown_ends_every_grace() -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica, patient(replica) as run:
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT)), lambda: replica.requests)
        run.gateway.running.drain()
        await eventually(lambda: replica.gone == 1)
        await eventually(lambda: nothing_is_held(run))


async def test_a_client_that_leaves_after_the_last_event_has_its_answer() -> None:
    """Only the end of the framing is missing: the same request gets a new answer."""
    never = asyncio.Event()
    async with FakeReplica([events(*STREAMS[CHAT], then=never), answers()]) as replica, patient(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(sent(CHAT, body_of(CHAT)))
            await reader.readuntil(DONE)
        await eventually(lambda: replica.gone == 1)
        assert await abandoned(run) == {}


class Left(Abandonments):
    """Counts clients that leave."""

    count = 0

    def left(self, kept: KeptAnswer, task: asyncio.Task[None] | None) -> bool:
        self.count += 1
        return True


class UnreadReply(BytesReply):
    """flowing: the client reads. left: it is gone."""

    flowing = False
    left = False

    @property
    def gone(self) -> bool:
        return self.left

    @property
    def flows(self) -> bool:
        return self.flowing

    def end(self, last: bytes = b"") -> None:
        if self.left:
            raise ConnectionResetError
        super().end(last)


@uncompiled
@pytest.mark.parametrize("flowing", [True, False])
def test_an_answer_is_received_once_nothing_of_it_waits_in_the_gateway(flowing: bool) -> None:
    left_, inner = Left(), UnreadReply()
    kept = KeptAnswer(KeptAnswers(left_, 1 << 20), _exchange())
    reply, inner.flowing = kept.reply(inner, None), flowing
    reply.begin(200, b"", length=None, first=b"a")
    reply.end(b"b")
    assert kept.left(None) is not flowing
    assert (left_.count, bytes(inner.body)) == (0 if flowing else 1, b"ab")


@uncompiled
@pytest.mark.parametrize(("size", "gone", "kept"), [(AT_ONCE, False, False), (AT_ONCE, True, True), (AT_ONCE + 1, False, True)])
def test_a_small_plain_answer_is_kept_only_for_a_client_that_has_left(size: int, gone: bool, kept: bool) -> None:
    inner = UnreadReply()
    answer, inner.left = KeptAnswer(KeptAnswers(Left(), 1 << 20), _exchange()), gone
    reply = answer.reply(inner, size)
    reply.begin(200, b"", length=size, first=b"x" * size)
    assert (reply is not inner, answer.left(None)) == (kept, kept)


@uncompiled
def test_a_client_that_leaves_while_the_end_is_written_has_not_received_it() -> None:
    """Its connection says so later than the write that fails."""
    left_, inner = Left(), UnreadReply()
    kept = KeptAnswer(KeptAnswers(left_, 1 << 20), _exchange())
    reply, inner.left = kept.reply(inner, None), True
    reply.begin(200, b"", length=None, first=b"a")
    reply.end(b"b")
    kept.close()
    assert left_.count == 1


@uncompiled
def test_an_unread_answer_that_has_broken_off_is_not_kept() -> None:
    left_, inner, exchange = Left(), UnreadReply(), _exchange()
    kept = KeptAnswer(KeptAnswers(left_, 1 << 20), exchange)
    reply, inner.flowing = kept.reply(inner, None), False
    reply.begin(200, b"", length=None, first=b"a")
    exchange.record.code = "replica_failed"
    reply.end(b"its error event")
    assert (kept.left(None), left_.count) == (False, 0)


def _exchange() -> Exchange:
    exchange = Exchange(BytesRequest(b"{}", CHAT), DIALECTS[CHAT], new_record(None, CHAT, 0.0))
    exchange.api = ApiRequest("m", b"", "", stream=True, metered=True, body=b"{}")
    return exchange


# -- bounds


def tokens_of(count: int, go: asyncio.Event, at: int) -> Behaviour:
    """A stream of so many tokens, which stops before number `at` until the event is set."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(count):
            if number == at:
                await writer.drain()
                await go.wait()
            writer.write(chunk(event(f"token {number} ", "stop" if number == count - 1 else None)))
        writer.write(chunk(DONE) + b"0\r\n\r\n")

    return behave


async def test_what_cannot_be_kept_ends_with_its_client() -> None:
    never = asyncio.Event()
    async with FakeReplica([tokens_of(200, never, 199)]) as replica, patient(replica) as run:
        adoptions(run).answers.most = STEP
        async with dial(run) as (reader, writer):
            writer.write(sent(CHAT, body_of(CHAT)))
            for number in range(199):
                await reader.readuntil(b"token %d " % number)
        await eventually(lambda: replica.gone == 1)
        assert await abandoned(run) == {}
        await eventually(lambda: nothing_is_held(run))


async def test_beginnings_are_charged_to_the_memory_of_the_client() -> None:
    never = asyncio.Event()
    async with FakeReplica([tokens_of(400, never, 399)]) as replica, patient(replica) as run:
        all_, memory = adoptions(run).answers, run.gateway.served.memory
        async with dial(run) as (reader, writer):
            writer.write(sent(CHAT, body_of(CHAT)))
            for number in range(399):
                await reader.readuntil(b"token %d " % number)
            assert STEP < all_.held <= memory.held
        await left(run)
        (answer,) = adoptions(run)._waiting.values()
        assert all_.held == 0
        assert UNCHARGED < answer.log.size <= memory.held
        answer.log.check()


async def test_what_grows_too_large_without_a_client_is_cancelled() -> None:
    go, never = asyncio.Event(), asyncio.Event()

    async def engine(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")))
        await writer.drain()
        await go.wait()
        for _ in range(4):
            writer.write(chunk(event("x" * 1000)))
        await writer.drain()
        await never.wait()

    async with FakeReplica([engine]) as replica, patient(replica) as run:
        adoptions(run).logs = Logs(1000)
        await asks_and_leaves(run, sent(CHAT, body_of(CHAT)), lambda: replica.requests, 200)
        go.set()
        await eventually(lambda: replica.gone == 1)
        assert await abandoned(run) == {"too_large": 1}
        await eventually(lambda: nothing_is_held(run))


async def test_a_caller_has_a_bounded_number_of_answers_without_a_client() -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica, patient(replica) as run:
        adoptions(run).places = RunPlaces(100, 2)
        for number in range(2):
            await asks_and_leaves(
                run, sent(CHAT, body_of(CHAT, seed=number)), lambda n=number: len(replica.requests) == n + 1, 0, number + 1
            )
        async with dial(run) as (_, writer):
            writer.write(sent(CHAT, body_of(CHAT, seed=3)))
            await eventually(lambda: len(replica.requests) == 3)
        await eventually(lambda: replica.gone == 1)
        assert adoptions(run).answers.waiting == 2


async def test_a_flood_of_clients_that_leave_holds_nothing() -> None:
    never = asyncio.Event()
    async with FakeReplica([once(never, answers())]) as replica, running(replica, **BRIEF) as run:
        data = sent(CHAT, body_of(CHAT))

        async def one() -> None:
            async with dial(run) as (_, writer):
                writer.write(data)
                await writer.drain()

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(50)))
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        await eventually(lambda: nothing_is_held(run))
        await eventually(lambda: replica.gone == len(replica.requests))


class Source(PausableSource):
    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


@uncompiled
async def test_a_follower_that_does_not_read_pauses_the_replica() -> None:
    first, second = Source(), Source()
    generation = DetachedAnswer(("o", "1"), Logs(), Budget(1 << 20).lease("c"), lambda: 0.0)
    generation.feed_from(first)
    generation.pause()
    assert first.paused
    generation.feed_from(second)
    assert second.paused, "of another replica"
    generation.resume()
    assert not second.paused
    gate = FollowerGate(generation)
    gate.pause()
    assert second.paused
    gate.resume()
    assert not second.paused


# -- cuts


@pytest.mark.parametrize("cuts", [100])
async def test_each_token_is_generated_once_wherever_clients_are_cut(cuts: int) -> None:
    chance, count = random.Random(43), 30
    holds = {number: asyncio.Event() for number in range(cuts)}
    whole = b"".join([*(event(f"token {n} ", "stop" if n == count - 1 else None) for n in range(count)), DONE])

    async def engine(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await tokens_of(count, holds[request.json["seed"]], 25)(request, writer)

    async with FakeReplica([engine]) as replica, patient(replica) as run:

        async def one(number: int) -> None:
            data = sent(CHAT, body_of(CHAT, seed=number), b"X-Request-Id: cut-%d" % number)
            for _ in range(chance.randrange(1, 4)):
                async with dial(run) as (reader, writer):
                    writer.write(data)
                    await reader.readexactly(chance.randrange(1, 3000))
                await eventually(lambda: f"cut-{number}" in waiting_ids(run))
            again = asyncio.create_task(gets(run, data))
            await eventually(lambda: f"cut-{number}" not in waiting_ids(run))
            holds[number].set()
            assert (await again)[2] == whole

        for at in range(0, cuts, 20):
            await asyncio.gather(*(one(number) for number in range(at, at + 20)))
        assert sorted(request.json["seed"] for request in replica.requests) == list(range(cuts))
        found = await abandoned(run)
        assert (set(found), found["adopted"] >= cuts) == ({"adopted"}, True)
        await eventually(lambda: nothing_is_held(run))


def waiting_ids(run: Running) -> set[str]:
    """The ids of the requests whose answers have no client."""
    return {answer.record.id for answer in adoptions(run)._waiting.values()}
