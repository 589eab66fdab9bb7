"""A client that closes its side has left: it frees its replica at once. One that stays gets all of its answers.

On both event loops, for this is about what they make of the end of what a client sends.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from gateway.upstream.http1 import AnswerParser
from tests.chaos.wire import port_of
from tests.gateway.conftest import eventually, running
from tests.gateway.request.test_robust import RAW, STREAM, dial, post, served
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, hangs, streams

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def chunked(body: bytes, *lines: bytes) -> bytes:
    """The same request as `post` makes, in one chunk."""
    head = b"\r\n".join([b"POST /v1/chat/completions HTTP/1.1", b"Host: h", b"Transfer-Encoding: chunked", *lines, b"", b""])
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


CLOSE = b"Connection: close"


def after(go: asyncio.Event, then: Behaviour) -> Behaviour:
    """Wait before the answer's first byte."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await then(request, writer)

    return behave


async def read_all(reader: asyncio.StreamReader, count: int = 1) -> list[bytes]:
    """The bodies of `count` answers, after which the connection ends."""
    rest, bodies = await reader.read(), list[bytes]()
    for _ in range(count):
        answer = AnswerParser()
        bodies.append(answer.feed(rest))
        assert answer.complete, rest
        rest = answer.rest
    assert not rest
    return bodies


@on_both_loops
def test_pipelined_requests_are_all_answered(run: Run) -> None:
    async def scenario() -> None:
        go = asyncio.Event()
        async with FakeReplica([after(go, answers("one")), answers("two")]) as replica, running(replica) as gateway:
            for frame in (post, chunked):
                async with dial(gateway) as (reader, writer):
                    writer.write(frame(RAW) + frame(RAW, CLOSE))
                    await eventually(lambda: replica.requests)
                    go.set()
                    assert len(await read_all(reader, 2)) == 2
                assert len(replica.requests) == 2
                replica.requests.clear()

    run(scenario())


Leaving = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def closes(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def half_closes(writer: asyncio.StreamWriter) -> None:
    """It may still read: no server can know."""
    writer.write_eof()


async def half_closes_then_resets(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    await resets(writer)


@on_both_loops
@pytest.mark.parametrize("leave", [closes, resets, half_closes, half_closes_then_resets])
@pytest.mark.parametrize("frame", [post, chunked])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_frees_its_replica(
    streaming: bool, frame: Callable[[bytes], bytes], leave: Leaving, run: Run
) -> None:
    async def scenario() -> None:
        never = asyncio.Event()
        first = streams("a", "b", hold=never) if streaming else hangs(never)
        async with FakeReplica([first, answers()]) as replica, running(replica) as gateway:
            async with dial(gateway) as (reader, writer):
                writer.write(frame(STREAM if streaming else RAW))
                if streaming:
                    await reader.readuntil(b"\n\n\r\n")
                else:
                    await eventually(lambda: replica.requests)
                await leave(writer)
                await eventually(lambda: replica.gone == 1)
            await served(gateway)
            await eventually(lambda: gateway.gateway.served.memory.clients == 1)

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("leave", [closes, resets, half_closes])
def test_a_client_that_leaves_behind_many_requests_is_noticed(leave: Leaving, run: Run) -> None:
    """Its connection is not read, because too much waits behind the first one."""

    async def scenario() -> None:
        never = asyncio.Event()
        async with FakeReplica([hangs(never), answers()]) as replica, running(replica) as gateway:
            async with dial(gateway) as (_, writer):
                writer.write(post(RAW) * 1000)
                await eventually(lambda: replica.requests)
                await eventually(lambda: gateway.gateway.served.memory.held > 64_000)
                await leave(writer)
                await eventually(lambda: replica.gone == 1)
            await eventually(lambda: gateway.gateway.served.memory.held == 0)

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("frame", [post, chunked])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_that_ends_in_its_middle_is_none(
    frame: Callable[[bytes], bytes], run: Run, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with FakeReplica() as replica, running(replica) as gateway:
            async with dial(gateway) as (reader, writer):
                writer.write(frame(RAW)[:-5])
                if not at_once:
                    await eventually(lambda: gateway.gateway.served.memory.held)
                writer.write_eof()
                assert await reader.read() == b""
            assert not replica.requests
            await served(gateway)

    run(scenario())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


DENSE = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["\n"] * 5000}, indent=0).encode()


@on_both_loops
def test_a_whole_request_behind_another_is_answered_though_it_is_read_in_turns(run: Run) -> None:
    pieces = b"".join(b"3\r\n%b\r\n" % DENSE[at : at + 3] for at in range(0, len(DENSE) // 3 * 3, 3))
    rest = DENSE[len(DENSE) // 3 * 3 :]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    second = (
        head.replace(b"Host: h", b"Host: h\r\nConnection: close")
        + pieces
        + (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"")
        + b"0\r\n\r\n"
    )

    async def scenario() -> None:
        go = asyncio.Event()
        async with FakeReplica([after(go, answers()), answers()]) as replica, running(replica) as gateway:
            async with dial(gateway) as (reader, writer):
                writer.write(post(RAW) + second)
                await eventually(lambda: replica.requests)
                go.set()
                assert len([got for got in await all_of(reader) if got.startswith(b"HTTP/1.1 200 ")]) == 2
            assert [request.body for request in replica.requests] == [RAW, DENSE]

    run(scenario())


async def all_of(reader: asyncio.StreamReader) -> list[bytes]:
    """The answers until the end."""
    data = await reader.read()
    return [b"HTTP/1.1" + part for part in data.split(b"HTTP/1.1")[1:]]


@on_both_loops
def test_pipelined_bodies_of_many_chunks_are_all_read(run: Run) -> None:
    body = b'{"model":"m","prompt":"' + b"x" * 16_360 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"

    def request(size: int) -> bytes:
        padded = body + b" " * (size - len(body))
        return head + b"".join(b"1\r\n%c\r\n" % byte for byte in padded) + b"0\r\n\r\n"

    async def scenario() -> None:
        async with FakeReplica() as replica, running(replica) as gateway:
            for size in (16_384, 16_385, 16_386):
                async with dial(gateway) as (reader, writer):
                    last = request(size).replace(b"Transfer-", b"Connection: close\r\nTransfer-", 1)
                    writer.write(request(16_385) + request(size) + last)
                    async with asyncio.timeout(20):
                        assert len([got for got in await all_of(reader) if got.startswith(b"HTTP/1.1 200 ")]) == 3
            assert len(replica.requests) == 9

    run(scenario())


@on_both_loops
def test_a_refused_client_that_sends_on_is_not_reset(run: Run) -> None:
    """It sends all before it reads; what is left of its head is read in turns, and dropped."""
    lines = b"GET / HTTP/1.1\r\nHost: h\r\n" + b"a: b\r\n" * 330_000

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=40) as sock:
            sock.sendall(lines)
            time.sleep(0.05)  # after which it may have been reset
            return b"".join(iter(lambda: sock.recv(1 << 16), b""))

    async def scenario() -> None:
        async with FakeReplica() as replica, running(replica) as gateway:
            for _ in range(3):
                answer = await asyncio.to_thread(ask, port_of(gateway.url))
                assert answer.startswith(b"HTTP/1.1 400 ")

    run(scenario())
