"""What clients send, over real sockets: memory and its fair parts, heads, compressed bodies, and what is not let in."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from gateway.admission.memory import Budget
from gateway.cluster.process import budget_bytes, memory_bytes
from gateway.server.http.connection import MAX_UNCHARGED
from gateway.server.http.inflate import INFLATER_BYTES
from gateway.server.http.request_head import HEAD_COPIES, MAX_HEAD_BYTES
from gateway.turns import turns_of
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.request.test_robust import RAW, STREAM, dial, post, read_answer, served
from tests.support.configs import load
from tests.support.fakes import (
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies,
    dies_now,
    event,
    hangs,
    http,
    streams,
    writes,
)

MIB = 1 << 20
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def filled(size: int, **fields: Any) -> bytes:
    """A chat of about `size` bytes."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * size}], **fields}).encode()


def chunked(body: bytes, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    """A request whose length is not known before its end."""
    lines = [b"POST %b HTTP/1.1" % path, b"Host: h", b"Transfer-Encoding: chunked", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@contextlib.asynccontextmanager
async def dial_from(run: Running, address: str) -> AsyncIterator[Connection]:
    host, port = run.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.transport.abort()


async def released(run: Running) -> None:
    """Nobody holds anything."""
    budget = run.gateway.served.memory
    await eventually(lambda: budget.held == 0)
    budget.check()


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    return error


# -- the budget


@pytest.mark.parametrize("frame", [post, chunked])
async def test_one_client_cannot_take_all_the_memory(frame: Callable[[bytes], bytes]) -> None:
    """Uploads that never end fill what their address may hold; another address is served meanwhile."""
    limits = {"inflight_mb": 11, "drain_timeout_s": 1}
    half = frame(filled(2 * MIB))[: 2 * MIB]
    async with FakeReplica() as replica, running(replica, limits=limits) as run, contextlib.AsyncExitStack() as stack:
        budget, refused = run.gateway.served.memory, []
        for _ in range(6):
            reader, writer = await stack.enter_async_context(dial_from(run, "127.0.0.1"))
            held = budget.held
            writer.write(half)
            await eventually(lambda held=held: budget.held > held + 2 * MIB - 100 or budget.refused > len(refused))
            if budget.refused > len(refused):
                refused.append(await read_answer(reader))
        assert 5 * MIB < budget.held <= budget.largest
        assert refused
        for code, headers, body in refused:
            assert (code, error_of(body)["code"]) == (503, "gateway_overloaded")
            assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        reader, writer = await stack.enter_async_context(dial_from(run, "127.0.0.2"))
        for size in (100, 100_000, MIB // 4):
            writer.write(frame(filled(size)))
            assert (await read_answer(reader))[0] == 200
        metrics = await run.metrics()
        assert metrics["warmroute_inflight_limit_bytes"] == 11 * MIB
        assert metrics["warmroute_inflight_bytes"] == pytest.approx(budget.held, abs=10_000)
        assert metrics["warmroute_memory_rejected_total"] == len(refused)
        await stack.aclose()
        await released(run)
        await served(run)


@pytest.mark.parametrize("frame", [post, chunked])
async def test_a_request_larger_than_a_share_is_too_large(frame: Callable[[bytes], bytes]) -> None:
    """The answer can be read also by a client that reads only after it has sent everything."""
    async with FakeReplica() as replica, running(replica, limits={"inflight_mb": 4, "drain_timeout_s": 1}) as run:
        async with dial(run) as (reader, writer):
            writer.write(frame(filled(5 * MIB)))
            await writer.drain()
            code, headers, body = await read_answer(reader)
            assert (code, error_of(body)["code"]) == (413, "request_too_large")
            message = error_of(body)["message"]
            if frame is post:  # otherwise its size is not known before its end
                assert message.startswith("The body has 5 MiB and needs 15 MiB while it is parsed; ")
            assert "one client's share of this gateway process's memory for requests is 3.2 MiB" in message
            assert headers["connection"] == "close"
        assert not replica.requests
        await released(run)
        await served(run)


async def test_a_body_over_the_limit_is_refused_before_it_arrives() -> None:
    async with FakeReplica() as replica, running(replica, limits={"body_mb": 1, "drain_timeout_s": 1}) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(b"x" * (2 * MIB))[:1000])
            code, _, body = await read_answer(reader)
            assert (code, error_of(body)["code"]) == (413, "request_too_large")
        await released(run)


async def test_memory_is_no_reason_to_refuse_the_next_request_on_a_connection() -> None:
    async with FakeReplica() as replica, running(replica, limits={"inflight_mb": 4, "drain_timeout_s": 1}) as run:
        async with dial(run) as (reader, writer):
            for _ in range(12):
                for frame in (post, chunked):
                    writer.write(frame(filled(600_000)))
                    assert (await read_answer(reader))[0] == 200
        await released(run)
        assert run.gateway.served.memory.refused == 0


async def resumable(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + chunk(event("a")))
    await writer.drain()
    dies_now(writer)


async def forever(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def leaves(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def reads(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


LARGE = filled(400_000)
Outcome = tuple[bytes, Behaviour, Callable[..., Awaitable[None]]]
OUTCOMES: dict[str, Outcome] = {
    "answered": (post(LARGE), answers(), reads),
    "a large answer": (post(LARGE), writes(http(200, json.dumps({"x": "y" * MIB}).encode())), reads),
    "streamed": (post(filled(400_000, stream=True)), streams("a", "b"), reads),
    "resumed": (post(filled(400_000, stream=True, max_tokens=9)), resumable, reads),
    "inflated": (chunked(gzip.compress(LARGE), b"Content-Encoding: gzip"), answers(), reads),
    "a bomb": (chunked(gzip.compress(filled(4 * MIB)), b"Content-Encoding: gzip"), answers(), reads),
    "no JSON": (post(LARGE[:-1]), answers(), reads),
    "no model": (post(LARGE.replace(b'"m"', b'"x"')), answers(), reads),
    "no replica answers": (post(LARGE), dies, reads),
    "not let in": (chunked(LARGE, path=b"/v1/../x"), answers(), reads),
    "too late": (post(LARGE)[:-1], answers(), reads),
    "the client leaves while it sends": (post(LARGE)[:-1], answers(), leaves),
    "the same, in chunks": (chunked(LARGE)[:-5], answers(), leaves),
    "the client leaves while it waits": (post(LARGE), forever, leaves),
    "the client leaves in its head": (post(LARGE)[:50], answers(), leaves),
    "pipelined": (post(LARGE) + post(LARGE) + chunked(LARGE), answers(), reads),
    "pipelined, and gone": (post(LARGE) + post(LARGE) + chunked(LARGE), forever, leaves),
    "a body that nobody wants": (chunked(LARGE, path=b"/health"), answers(), reads),
}


@pytest.mark.parametrize("name", OUTCOMES)
async def test_nothing_is_held_after(name: str) -> None:
    data, behaviour, then = OUTCOMES[name]
    pools = {"pools": [{"replicas": [], "resume_streams": True}]}
    limits = {"body_s": 0.3, "client_idle_s": 0.3, "drain_timeout_s": 1}
    async with FakeReplica([behaviour, answers()]) as replica, FakeReplica([streams("b")]) as other:
        pools["pools"][0]["replicas"] = [replica.url, other.url] if name == "resumed" else [replica.url]
        async with running(limits=limits, **pools) as run:
            async with dial(run) as (reader, writer):
                writer.write(data)
                await then(reader, writer)
            await released(run)
            await eventually(lambda: run.gateway.served.memory.clients == 0)


@pytest.mark.parametrize("resume", [False, True])
async def test_a_body_is_dropped_when_its_answer_begins(resume: bool) -> None:
    """But for a stream that another replica may have to go on with."""
    go = asyncio.Event()
    async with FakeReplica([streams("a", "b", hold=go)]) as replica:
        pools = [{"replicas": [replica.url], "resume_streams": resume}]
        async with running(pools=pools) as run, dial(run) as (reader, writer):
            writer.write(post(filled(MIB, stream=True)))
            await reader.readuntil(b'"a"')
            held = run.gateway.served.memory.held
            assert held > MIB if resume else held < 1000
            go.set()
            await reader.readuntil(b"0\r\n\r\n")
            await released(run)


async def test_a_body_is_held_once_and_not_while_its_answer_streams() -> None:
    """By the memory that Python has allocated, not by our own books."""
    size, asked, go = 8 * MIB, asyncio.Event(), asyncio.Event()

    async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A replica that keeps nothing."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(http(200, b'{"object":"list","data":[{"id":"m"}]}', "application/json", "Connection: close"))
            writer.close()
            return
        left = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while left:
            left -= len(await reader.read(min(left, 1 << 16)))
        asked.set()
        await go.wait()
        writer.write(STREAM_HEAD + chunk(event("a")))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(sink, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    data = post(filled(size, stream=True))
    async with running(url) as run, dial(run) as (reader, writer):
        tracemalloc.start()
        try:
            for at in range(0, len(data), 1 << 16):
                writer.write(data[at : at + (1 << 16)])
                await writer.drain()
            await asked.wait()
            assert tracemalloc.get_traced_memory()[0] < 1.3 * size
            go.set()
            await reader.readuntil(b'"a"')
            assert tracemalloc.get_traced_memory()[0] < 0.3 * size
        finally:
            tracemalloc.stop()
    server.close()
    await server.wait_closed()


# -- heads


def large_head(size: int) -> bytes:
    count = size // 1000
    return b"GET /health HTTP/1.1\r\nHost: h\r\n" + b"".join(b"H%d: %b\r\n" % (at, b"v" * 990) for at in range(count))


@pytest.mark.parametrize("end", [b"", b"\r\n"])
async def test_a_head_is_bounded_as_a_whole(end: bytes) -> None:
    """By pieces or at once, whether it ends or not."""
    data = large_head(MAX_HEAD_BYTES + 10_000) + end
    async with FakeReplica() as replica, running(replica) as run:
        for piece in (len(data), 10_000):
            async with dial(run) as (reader, writer):
                for at in range(0, len(data), piece):
                    writer.write(data[at : at + piece])
                    await asyncio.sleep(0)
                if not end:
                    writer.write(b"X: y\r\n")
                code, _, body = await read_answer(reader)
                assert (code, error_of(body)["code"]) == (431, "head_too_large")
                assert await reader.read() == b""
        await released(run)


@pytest.mark.parametrize("line", [b"X-A: " + b"a" * 70_000, b"a" * 70_000 + b": x"], ids=["value", "name"])
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_a_single_header_is_bounded(line: bytes, end: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n" + line + end)
            assert await refused_as(reader) == (431, "head_too_large")
        await released(run)


async def test_a_request_line_is_bounded() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: h\r\n\r\n")
            assert await refused_as(reader) == (431, "head_too_large")
        await released(run)


async def test_the_error_for_what_is_not_http_is_a_whole_sentence() -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n")
        message = error_of((await read_answer(reader))[2])["message"]
        assert message == "The request is not valid HTTP/1.1: Content-Length can't be present with Transfer-Encoding"


async def refused_as(reader: asyncio.StreamReader) -> tuple[int, str]:
    """(status, error code) of an answer in HTTP/1.1 after which the connection is closed."""
    line = await reader.readline()
    assert line.startswith(b"HTTP/1.1 "), line
    headers, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in headers.lower()
    return int(line.split()[1]), error_of(body)["code"]


async def test_a_head_just_below_the_bound_is_read() -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(large_head(MAX_HEAD_BYTES - 4000) + b"\r\n")
        assert (await read_answer(reader))[0] == 200
        await released(run)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """In each turn of the event loop there is work that waits for the next one."""
    turns, over = turns_of(asyncio.get_running_loop()), False

    def work() -> None:
        if not over:
            turns.later(work)

    work()
    try:
        yield
    finally:
        over = True


async def test_what_waits_for_its_turn_and_may_not_be_held_is_refused() -> None:
    async with FakeReplica() as replica, running(replica, limits={"inflight_mb": 1, "drain_timeout_s": 1}) as run:
        others = [run.gateway.served.memory.lease(f"greedy {number}") for number in range(5)]
        for lease in others:
            while lease.grow(1024):
                """It takes all that it can get."""
        async with dial(run) as (reader, writer):
            with busy():
                writer.write(chunked(filled(200_000)))
                code, headers, body = await read_answer(reader)
            assert (code, error_of(body)["code"], headers["retry-after"]) == (503, "gateway_overloaded", "1")
        for lease in others:
            lease.close()
        assert not replica.requests
        await released(run)
        with busy():
            await served(run)


async def test_unfinished_heads_are_counted() -> None:
    size = 50_000
    async with FakeReplica() as replica, running(replica, limits={"inflight_mb": 1, "drain_timeout_s": 1}) as run:
        async with contextlib.AsyncExitStack() as stack:
            readers = []
            for _ in range(9):
                reader, writer = await stack.enter_async_context(dial_from(run, "127.0.0.1"))
                writer.write(large_head(size))
                readers.append(reader)
            fitting = run.gateway.served.memory.largest // (len(large_head(size)) * HEAD_COPIES)
            await eventually(lambda: run.gateway.served.memory.refused == 9 - fitting)
            assert run.gateway.served.memory.held == fitting * len(large_head(size)) * HEAD_COPIES
            code, headers, body = await read_answer(readers[-1])
            assert (code, error_of(body)["code"], headers["retry-after"]) == (503, "gateway_overloaded", "1")
            reader, writer = await stack.enter_async_context(dial_from(run, "127.0.0.2"))
            writer.write(post())
            assert (await read_answer(reader))[0] == 200
        await released(run)


# -- floods


@pytest.mark.parametrize("first", [post(), chunked(RAW)])
async def test_pipelined_requests_are_bounded_in_memory(first: bytes) -> None:
    """Behind a request that takes its time the connection is read no further, and what was read is counted."""
    flood = b"GET /health HTTP/1.1\r\nHost: h\r\nX: %b\r\n\r\n" % (b"y" * 900)
    async with FakeReplica([forever, answers()]) as replica, running(replica) as run:
        async with dial(run) as (_, writer):
            writer.write(first)
            await eventually(lambda: replica.requests)
            writer.write(flood * 20_000)
            budget = run.gateway.served.memory
            await eventually(lambda: budget.held > 32_000)
            for _ in range(1000):  # in which it would read all 20 MB
                await asyncio.sleep(0)
            assert 32_000 < budget.held < MIB
            no_linger = struct.pack("ii", 1, 0)  # what is not sent yet is thrown away: a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        await released(run)
        await eventually(lambda: replica.gone == 1)


def in_pieces(body: bytes) -> bytes:
    """A request whose body costs much to read for its length: each byte is a chunk."""
    head, _, _ = chunked(b"").partition(b"0\r\n")
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.mark.parametrize("count", [31, 40, 100, 2000])
@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
async def test_all_pipelined_requests_are_answered(count: int, apart: bool) -> None:
    """Also behind one whose head is read before its body."""
    first = in_pieces(RAW + b" " * 4000)
    head = first[: first.index(b"\r\n\r\n") + 4] if apart else b""
    async with FakeReplica([answers()]) as replica, running(replica) as run, dial(run) as (reader, writer):
        if apart:
            writer.write(head)
            await eventually(lambda: run.gateway.served.memory.held)
        writer.write(first[len(head) :] + b"GET /nowhere HTTP/1.1\r\nHost: h\r\n\r\n" * count)
        async with asyncio.timeout(40):
            assert (await read_answer(reader))[0] == 200
            for _ in range(count):
                assert (await read_answer(reader))[0] == 404


async def test_a_body_that_may_not_be_held_is_refused_though_it_is_read_in_turns() -> None:
    """At once, and not when the time for its body is over."""
    data = in_pieces(filled(30_000))
    async with FakeReplica([answers()]) as replica, running(replica, limits={"body_s": 1000}) as run:
        budget = run.gateway.served.memory
        other = budget.lease("other")
        budget.limit = 8 * MIB
        assert other.grow(budget.largest)
        budget.limit = budget.held + 20_000
        async with dial(run) as (reader, writer), asyncio.timeout(40):
            writer.write(data)
            assert (await read_answer(reader))[0] == 503
        other.close()
        assert not replica.requests


async def test_pipelined_bytes_beyond_the_budget_end_the_connection() -> None:
    """After the answer to the request before them; the client sees that there is none to them, and may repeat them."""
    go = asyncio.Event()

    async def late(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await answers()(request, writer)

    limits = {"inflight_mb": 8, "drain_timeout_s": 1}
    async with FakeReplica([late]) as replica, running(replica, limits=limits) as run:
        async with contextlib.AsyncExitStack() as stack, dial(run) as (reader, writer):
            writer.write(post())
            await eventually(lambda: replica.requests)
            for _ in range(4):
                _, other = await stack.enter_async_context(dial(run))
                other.write(post(filled(1_650_000))[:-1])
            await eventually(lambda: run.gateway.served.memory.held > 6_600_000)
            writer.write(post(filled(200_000)))
            await eventually(lambda: run.gateway.served.memory.refused)
            go.set()
            assert (await read_answer(reader))[0] == 200
            assert await reader.read() == b""
        assert len(replica.requests) == 1
        await released(run)


async def test_a_plain_answer_is_charged_while_it_is_read() -> None:
    """Its beginning is read before it goes on, so what many replicas send at once must not fill the memory."""
    piece = b" " * (1 << 16)
    sent = 0

    async def endless(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000000\r\n\r\n")
        while True:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async with FakeReplica([endless, answers()]) as replica, running(replica, limits={"inflight_mb": 1}) as run:
        status, headers, body = await run.post(RAW)
        assert (status, body["error"]["code"]) == (413, "request_too_large"), "a repetition would have no more room"
        assert "Send or ask for less, or raise the limit" in body["error"]["message"]
        assert (headers.get("Retry-After"), headers["x-should-retry"]) == (None, "false")
        assert sent < 40 * MIB
        await eventually(lambda: run.gateway.served.memory.held == 0)
        assert (await run.post(RAW))[0] == 200


async def test_a_client_that_reads_no_answer_of_an_endpoint_is_cut_off() -> None:
    limits = {"client_idle_s": 0.3, "drain_timeout_s": 1}
    async with FakeReplica() as replica, running(replica, limits=limits) as run, dial(run) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n" * 100)
                await writer.drain()
        await released(run)
        await eventually(lambda: run.gateway.served.memory.clients == 0)


@pytest.mark.parametrize("size", [30 * MIB, 60 * MIB])  # more than the kernel's buffers hold
async def test_an_answer_that_is_not_read_is_counted(size: int) -> None:
    """What the client has not taken of a plain answer; one that is larger than all memory there is comes through, too."""
    answer = writes(http(200, json.dumps({"x": "y" * size}).encode()))
    limits = {"inflight_mb": 10, "drain_timeout_s": 1}
    async with FakeReplica([answer, answers()]) as replica, running(replica, limits=limits) as run:
        async with dial(run) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(post())
            await eventually(lambda: run.gateway.served.memory.held > 2 * MAX_UNCHARGED)  # its request is far smaller
            assert run.gateway.served.memory.held < 3 * MIB
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            code, _, body = await read_answer(reader)
            assert (code, len(body)) == (200, size + len('{"x": ""}'))
            await eventually(lambda: run.gateway.served.memory.held == 0)
        await released(run)


async def test_an_http_1_0_client_whose_unread_stream_has_no_room_is_reset() -> None:
    """Its answer lasts until the connection ends: a plain end would look like that of a complete answer."""
    full = asyncio.Event()

    async def endless(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")))
        await full.wait()
        while True:
            writer.write(chunk(event("b" * (1 << 16))))
            await writer.drain()

    async with FakeReplica([endless]) as replica, running(replica, limits={"drain_timeout_s": 1}) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM, version=b"1.0"))
            await reader.readuntil(event("a"))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            run.gateway.served.memory.limit = 0
            full.set()
            await eventually(lambda: not run.gateway.served.connections.open)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            with pytest.raises(ConnectionResetError):
                await reader.read()
        await released(run)


async def test_a_body_that_a_replica_answers_before_it_has_read_it_is_counted_until_it_is_sent() -> None:
    size, read, end = 30 * MIB, asyncio.Event(), asyncio.Event()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                writer.write(http(200, b'{"data": [{"id": "m"}]}', "application/json", "Connection: close"))
            else:
                writer.write(STREAM_HEAD + chunk(event("a")))
                await read.wait()
                await reader.readexactly(size)
                await end.wait()
        finally:
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    async with server, running(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", limits={"inflight_mb": 400}) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(filled(size, stream=True)))
            assert b" 200 " in await reader.readuntil(b"data: ")
            assert run.gateway.served.memory.held > size
            read.set()
            await eventually(lambda: run.gateway.served.memory.held < MIB)
            end.set()
        await released(run)


async def test_the_copy_of_a_large_body_with_its_tenants_salt_is_counted() -> None:
    go = asyncio.Event()
    turns = [answers(), hangs(go)]  # of both: without an idle connection a replica is asked once

    async def next_turn(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await turns.pop()(request, writer)

    limits, routing = {"inflight_mb": 40, "drain_timeout_s": 1}, {"isolation": "tenant"}
    async with (
        FakeReplica([next_turn]) as one,
        FakeReplica([next_turn]) as other,
        running(one, other, limits=limits, routing=routing) as run,
    ):
        async with dial(run) as (reader, writer):
            writer.write(post(filled(2 * MIB)))
            await eventually(lambda: one.requests or other.requests)
            assert len((one.requests or other.requests)[0].body) > 2 * MIB
            assert run.gateway.served.memory.held > 4 * MIB
            go.set()
            assert (await read_answer(reader))[0] == 200, "another attempt was made"
        await released(run)


async def test_what_decompression_takes_beside_its_output_is_counted() -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (_, writer):
        body = gzip.compress(filled(1000))
        writer.write(post(body, b"Content-Encoding: gzip")[:-10])
        await eventually(lambda: run.gateway.served.memory.held > INFLATER_BYTES)


async def test_all_of_a_plain_answer_is_counted_while_it_is_read() -> None:
    size, end = 1 << 16, asyncio.Event()

    async def slow(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{" % (size + 2))
        writer.write(b" " * size)
        await end.wait()
        writer.write(b"}")

    async with FakeReplica([slow]) as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(post())
        await eventually(lambda: run.gateway.served.memory.held > size)
        end.set()
        assert (await read_answer(reader))[0] == 200
        await released(run)


async def test_a_stream_that_is_kept_for_resumption_is_counted() -> None:
    """As long as there is room for it: one that outgrows it goes on, but is kept no more."""
    go = asyncio.Event()

    async def flood(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(18):
            writer.write(chunk(event("x" * 50_000)))
            await writer.drain()
        await go.wait()
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with FakeReplica([flood]) as replica:
        pools = [{"replicas": [replica.url], "resume_streams": True}]
        async with running(pools=pools, limits={"inflight_mb": 1, "drain_timeout_s": 1}) as run, dial(run) as (reader, writer):
            budget, most, received = run.gateway.served.memory, 0, b""
            writer.write(post(STREAM))
            while received.count(b"data: ") < 18:
                received += await reader.read(1 << 16)
                most = max(most, budget.held)
            assert 500_000 < most <= budget.largest
            assert budget.held < 10_000
            go.set()
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(1 << 16)
            await released(run)


# -- compressed bodies


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/other"])
@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        (b"gzip", gzip.compress),
        (b"x-gzip", gzip.compress),
        (b"GZIP", gzip.compress),
        (b"deflate", zlib.compress),
        (b"deflate", raw_deflate),
        (b"identity", bytes),
    ],
)
async def test_a_compressed_body_goes_on_as_it_was_before(coding: bytes, pack: Callable[[bytes], bytes], path: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(post(pack(RAW), b"Content-Encoding: " + coding, path=path))
        assert (await read_answer(reader))[0] == 200
        assert replica.requests[0].body == RAW
        assert "content-encoding" not in replica.requests[0].headers


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"compress", b"gzip, gzip", b"gzip\r\nContent-Encoding: br", b"huh"])
async def test_a_body_in_an_unknown_coding(coding: bytes) -> None:
    """It is passed on as it came, with its Content-Encoding; but nothing can be generated from it."""
    header = b"Content-Encoding: " + coding
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(b"\x28\xb5\x2f\xfd\x00", header, path=b"/v1/files"))
            assert (await read_answer(reader))[0] == 200
            assert replica.requests[0].body == b"\x28\xb5\x2f\xfd\x00"
            assert replica.requests[0].headers["content-encoding"] in (coding.decode(), "br")
            writer.write(post(b"\x28\xb5\x2f\xfd\x00", header))
            code, _, body = await read_answer(reader)
            assert (code, error_of(body)["code"]) == (415, "unsupported_encoding")
            assert error_of(body)["type"] == "invalid_request_error"
        assert len(replica.requests) == 1
        await served(run)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(b"[" + b"{}," * MIB + b"{}]"), 413),
        (gzip.compress(os.urandom(1000) * 1100), 413),  # 30:1, but more than body_mb
        (gzip.compress(RAW)[:-3], 400),
        (b"not gzip", 400),
    ],
    ids=["a bomb", "too large", "cut short", "no gzip"],
)
async def test_a_compressed_body_that_is_refused(body: bytes, status: int) -> None:
    async with FakeReplica() as replica, running(replica, limits={"body_mb": 1, "drain_timeout_s": 1}) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(body, b"Content-Encoding: gzip"))
            code, _, answer = await read_answer(reader)
            assert code == status
            assert error_of(answer)["type"] == "invalid_request_error"
        assert not replica.requests
        await released(run)
        await served(run)


async def test_decompression_lets_others_have_their_turn() -> None:
    """Sixty megabytes, and the event loop goes round while they are made."""
    turns, done = 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    filler = os.urandom(2000).hex().encode()
    text = b"".join(os.urandom(40).hex().encode() + filler for _ in range(15_000))
    async with FakeReplica([writes(http(200, b"{}"))]) as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(post(gzip.compress(text, 1), b"Content-Encoding: gzip", path=b"/v1/other"))
        await writer.drain()
        await eventually(lambda: run.gateway.served.memory.held > 2 * MIB)
        counting = asyncio.create_task(count())
        await eventually(lambda: replica.requests)
        done = True
        await counting
        assert (await read_answer(reader))[0] == 200
        assert replica.requests[0].body == text
    assert turns > 10


# -- what is not let in


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"identity", b"x, chunked", b"chunked, gzip", b"gzip"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/other"])
async def test_a_transfer_coding_that_is_not_known(coding: bytes, path: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            head = b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: %b\r\n\r\n" % (path, coding)
            writer.write(head + b"2\r\n{}\r\n0\r\n\r\n")
            code, _, body = await read_answer(reader)
            # Where chunked is not the last coding, the request has no known end, which is a 400 (RFC 9112, section 6.3).
            assert code == (501 if coding.endswith(b"chunked") else 400)
            assert error_of(body)["code"] in ("unknown_transfer_coding", "invalid_http")
            assert await reader.read() == b""
        assert not replica.requests
        await served(run)


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/../reset_prefix_cache",
        b"/v1/..",
        b"/v1/./chat/completions",
        b"/v1/%2e%2e/sleep",
        b"/v1/%2E./sleep",
        b"/v1//../../x",
        b"/v1/..%2fsleep",
        b"/v1/x%5c..%5csleep",
        b"/v1/..;a=b/sleep",
        b"/v1/chat/completions/..",
        b"/v1/x/..?a=b",
        b"http://h/v1/../x",
        b"/../v1/models",
    ],
)
@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_dot_segments_are_refused(path: bytes, method: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(b"%b %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}" % (method, path))
            code, _, body = await read_answer(reader)
            assert (code, error_of(body)["code"]) == (400, "invalid_http")
        assert not replica.requests
        await served(run)


@pytest.mark.parametrize(
    "path", [b"/v1/load_lora_adapter#x", b"/v1/chat/completions#", b"/health#", b"/v1/x?y=#z", b"http://h/v1/x#y"]
)
async def test_fragments_are_refused(path: bytes) -> None:
    """Servers cut them off: the replica would see another path than the one that was examined."""
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}" % path)
            code, _, body = await read_answer(reader)
            assert (code, error_of(body)["code"]) == (400, "invalid_http")
        assert not replica.requests
        await served(run)


@pytest.mark.parametrize("path", [b"/v1/a.b", b"/v1/...", b"/v1/..a/x", b"/v1/a../x", b"/v1/x?y=/../z", b"/v1/%41"])
async def test_dots_that_are_no_segments_pass(path: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(post(path=path))
        assert (await read_answer(reader))[0] == 200
        assert replica.requests[0].path.encode() == path


# -- how much memory there is


def test_the_budget_by_the_configuration() -> None:
    pools = {"pools": [{"replicas": ["http://a"]}]}

    def budget_of(**raw: Any) -> int:
        return budget_bytes(load(None, {**pools, **raw}, env={}))

    assert budget_of(limits={"inflight_mb": 100}) == 100 * MIB
    assert budget_of(limits={"inflight_mb": 100}, workers=4) == 25 * MIB
    assert budget_of() == memory_bytes() // 4
    assert budget_of(workers=2) == memory_bytes() // 4 // 2
    assert Budget(budget_of()).largest > 0


def test_the_memory_of_a_cgroup(tmp_path: Any) -> None:
    machine = memory_bytes(tmp_path)
    assert machine > MIB

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/self/cgroup", "0::/system.slice/gateway.service\n")
    write("sys/fs/cgroup/system.slice/gateway.service/memory.max", "max\n")
    assert memory_bytes(tmp_path) == machine
    write("sys/fs/cgroup/system.slice/memory.max", f"{512 * MIB}\n")
    assert memory_bytes(tmp_path) == 512 * MIB
    write("sys/fs/cgroup/memory.max", f"{256 * MIB}\n")  # a container's own, whatever path the host calls it by
    assert memory_bytes(tmp_path) == 256 * MIB
    write("proc/self/cgroup", "5:cpu:/a\n4:memory:/docker/1\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{128 * MIB}\n")
    assert memory_bytes(tmp_path) == 128 * MIB


def upgrading(protocol: bytes) -> bytes:
    return post(RAW, b"Connection: Upgrade", b"Upgrade: " + protocol)


@pytest.mark.parametrize("protocol", [b"h2c", b"ws", b"websocket"])
@pytest.mark.parametrize("apart", [0, 1, 40])
async def test_what_is_behind_an_upgrade_that_is_declined_is_answered(protocol: bytes, apart: int) -> None:
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        first = upgrading(protocol)
        writer.write(first[: len(first) - apart])
        if apart:
            await eventually(lambda: run.gateway.served.memory.held > 0)
        writer.write(first[len(first) - apart :] + post())
        for _ in range(2):
            status, headers, _ = await read_answer(reader)
            assert (status, headers.get("connection")) == (200, None)
        assert len(replica.requests) == 2


async def test_an_upgrade_with_nothing_behind_it_keeps_the_connection() -> None:
    """Java's client asks for h2c with each first request."""
    async with FakeReplica() as replica, running(replica) as run, dial(run) as (reader, writer):
        for _ in range(3):
            writer.write(upgrading(b"h2c"))
            status, headers, _ = await read_answer(reader)
            assert (status, headers.get("connection")) == (200, None)
        assert len(replica.requests) == 3
