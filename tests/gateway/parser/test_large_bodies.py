"""Large and hostile bodies over a real socket: what is too much is refused before it is built, the rest is served as it came,
and meanwhile the event loop turns and other clients get their answers.

Nothing here asserts a time: what is asserted is where the work was done. `python -m bench.gateway.parsing` measures the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.parser.parsing import INLINE_BYTES, UNCOUNTED_BYTES
from gateway.parser.process import ParserProcess
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica, answers

MIB = 1 << 20
CHAT = b'{"model":"m","messages":[{"role":"user","content":'

# shape -> head, item, what is between items, tail
SERVED = {
    "text": (CHAT + b'"', b"some words, and more. ", b"", b'"}]}'),
    "signs in a text": (CHAT + b'"', b'[{\\"a\\": [1, 2]}, {}], ', b"", b'"}]}'),
    "escapes": (CHAT + b'"', b"\\u00e9", b"", b'"}]}'),
    "emoji": (CHAT + b'"', "a😀".encode(), b"", b'"}]}'),
    "images": (CHAT + b"[", b'{"type":"image_url","image_url":{"url":"data:;base64,%b"}}' % (b"A" * 300_000), b",", b"]}]}"),
}
REFUSED = {
    "parts": (CHAT + b"[", b"{}", b",", b"]}]}"),
    "messages": (b'{"model":"m","messages":[', b'{"role":""}', b",", b"]}"),
    "lists": (CHAT + b'"x"}],"x":[', b"[]", b",", b"]}"),
    "nested": (CHAT + b'"x"}],"x":[', b"[" * 500 + b"]" * 500, b",", b"]}"),
    "tokens": (b'{"model":"m","prompt":[', b"1", b",", b"]}"),
    "unknown model": (b'{"model":"nobody","messages":[', b'{"role":""}', b",", b"]}"),
}


def body_of(shape: tuple[bytes, bytes, bytes, bytes], size: int) -> bytes:
    head, item, between, tail = shape
    return head + (item + between) * (size // (len(item) + len(between))) + item + tail


async def post(run: Running, raw: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any, Any]:
    return await run.post(io.BytesIO(raw), path)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def with_process(run: Running) -> ParserProcess:
    """The gateway's parser process, which runs now."""
    status, _, _ = await post(run, body_of(SERVED["text"], INLINE_BYTES))
    process = run.gateway.parsing.process
    assert (status, process.started) == (200, 1)
    return process


async def parsed_beside(run: Running, raw: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any, Any]:
    """The answer to this body, which the parser process has parsed: while that is stopped, it does not come, and others do."""
    process = run.gateway.parsing.process
    assert process.pid
    with stopped(process.pid):
        asked = asyncio.create_task(post(run, raw, path))
        await eventually(lambda: process._task or asked.done())
        for _ in range(3):
            status, _, _ = await run.get("/health")
            assert status == 200
        assert not asked.done(), "it was parsed in the loop"
    return await asked


@pytest.mark.parametrize("mib", [8, 60])
async def test_what_is_large_and_honest_is_served_as_it_came(mib: int) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        process = await with_process(run)
        for shape in SERVED.values():
            raw = body_of(shape, mib * MIB)
            status, _, _ = await parsed_beside(run, raw)
            assert status == 200
            assert replica.requests[-1].body == raw
            replica.requests.clear()
            if mib == 8:
                _, headers, _ = await post(run, raw)
                assert int(headers["X-Warmroute-Cached-Tokens"]) > 0, "the keys are those of the prompt"
                replica.requests.clear()
        assert process.started == 1


@pytest.mark.parametrize("mib", [2, 60])
async def test_what_is_only_structure_is_refused_before_it_is_built(mib: int) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        process = await with_process(run)
        for name, shape in REFUSED.items():
            raw = body_of(shape, mib * MIB)
            path = "/v1/completions" if name == "tokens" else "/v1/chat/completions"
            status, _, answer = await parsed_beside(run, raw, path)
            if name in ("messages", "unknown model") and mib == 2:
                assert status in (200, 404, 413)
                continue
            assert (status, answer["error"]["code"]) == (413, "request_too_complex"), name
            assert answer["error"]["type"] == "invalid_request_error"
        assert process.started == 1


@pytest.mark.parametrize(
    ("tail", "code"),
    [
        (b"\xff", "invalid_json"),
        (b"\\ud800", "invalid_json"),
        (b'"},5],"x":["', "invalid_request"),
        (b'"}],"x":[NaN,"', "invalid_json"),
    ],
)
async def test_what_is_wrong_is_a_400_at_any_size(tail: bytes, code: str) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for size in (1000, UNCOUNTED_BYTES, INLINE_BYTES, 9 * MIB):
            status, _, answer = await post(run, CHAT + b'"' + b"x" * size + tail + b'"}]}')
            assert (status, answer["error"]["code"]) in ((400, code), (400, "invalid_json"))
            status, _, answer = await post(run, CHAT + b'"' + b"x" * size + b'"}],"x":' + b"[" * 5000)
            assert (status, answer["error"]["code"]) == (400, "invalid_json")
        assert not replica.requests


async def test_a_conversation_matches_its_beginning_across_the_bound() -> None:
    """Its first turns are parsed in the loop, the later ones beside it: their keys are the same."""
    counted = [answers(prompt=tokens) for tokens in (400_000, 440_000, 480_000)]
    async with FakeReplica(), FakeReplica(counted) as replica, running(replica) as run:
        messages = [{"role": "user", "content": "word " * 400_000}]
        seen = []
        for _ in range(3):
            _, headers, _ = await post(run, json.dumps({"model": "m", "messages": messages}).encode())
            seen.append(int(headers["X-Warmroute-Cached-Tokens"]))
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "word " * 40_000}]
        assert run.gateway.parsing.process.started == 1
        assert seen[0] == 0 < seen[1] < seen[2]


async def test_a_large_stream_is_asked_for_usage_and_nothing_else_changes() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for options in (b"", b'"stream_options" : {"continuous_usage_stats":true } ,'):
            raw = b'{"stream":true,"seed":12345678901234567890123,%b' % options + body_of(SERVED["text"], 5 * MIB)[1:] + b" \n"
            async with run.session.post(run.url + "/v1/chat/completions", data=io.BytesIO(raw)) as answer:
                assert answer.status == 200
                await answer.read()
            body = replica.requests[-1].body
            added = b',"include_usage":true' if options else b',"stream_options":{"include_usage":true}'
            assert len(body) == len(raw) + len(added)
            assert body.replace(added, b"") == raw


async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    """One while its body is being parsed, two while theirs wait."""
    async with FakeReplica() as replica, running(replica) as run:
        process = await with_process(run)
        assert process.pid
        raw = body_of(SERVED["text"], 30 * MIB)
        with stopped(process.pid):
            tasks = [asyncio.create_task(post(run, raw)) for _ in range(3)]
            await eventually(lambda: "2 waiting" in repr(process))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await eventually(lambda: "0 waiting" in repr(process))
        status, _, _ = await post(run, body_of(SERVED["text"], INLINE_BYTES))
        assert (status, process.started) == (200, 1), "and the next result is the next body's"
        assert len(replica.requests) == 2


async def test_other_paths_and_the_dry_run_take_the_same_way() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        bomb = body_of(REFUSED["lists"], 8 * MIB)
        status, _, answer = await post(run, bomb, "/warmroute/route")
        assert (status, answer["error"]["code"]) == (413, "request_too_complex")
        status, _, answer = await post(run, body_of(SERVED["text"], MIB), "/warmroute/route")
        assert (status, answer["model"], answer["reason"]) == (200, "m", "cold")
        status, _, _ = await post(run, bomb, "/v1/anything")
        assert (replica.requests[-1].body, replica.requests[-1].path) == (bomb, "/v1/anything")
        assert run.gateway.parsing.process.started == 1
        assert status == 200
