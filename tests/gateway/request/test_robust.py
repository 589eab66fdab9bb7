"""Replicas and clients that break the protocol, on real sockets: no lease stays open, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gateway.upstream.dialer import Dialer
from gateway.upstream.pool import ConnectionPool
from gateway.upstream.resolver import Resolver
from gateway.upstream.timeouts import UpstreamTimeouts
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.fakes import (
    DONE,
    STREAM_HEAD,
    Behaviour,
    FakeReplica,
    FakeRequest,
    answers,
    chunk,
    dies_now,
    event,
    hangs,
    http,
    streams,
    usage,
    writes,
)

RAW = json.dumps({**BODY, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = RAW[:-1] + b', "stream": true}'
TURNS = {"routing": {"policy": "round_robin"}}
HELLO = b'"content": "hello"'


def post(body: bytes = RAW, *headers: bytes, version: bytes = b"1.1", path: bytes = b"/v1/chat/completions") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: localhost", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@contextlib.asynccontextmanager
async def dial(run: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = run.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
    try:
        async with asyncio.timeout(40):
            yield reader, writer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def unread(run: Running, sent: bytes) -> AsyncIterator[socket.socket]:
    """A client that has sent this and reads nothing by itself."""
    loop, (host, port) = asyncio.get_running_loop(), run.url.removeprefix("http://").split(":")
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await loop.sock_connect(plain, (host, int(port)))
        await loop.sock_sendall(plain, sent)
        yield plain


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer with a length or in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    status, body = int(head[0].split()[1]), b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return status, headers, body


async def settled(run: Running) -> None:
    """Nothing is left open, and the next request is served."""
    await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    run.gateway.router.check()
    assert (await run.get("/health"))[0] == 200


async def served(run: Running) -> None:
    await settled(run)
    status, _, body = await run.post(RAW)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")


# -- replicas


def head_of(*lines: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Type: application/json", *lines]) + b"\r\n\r\n"


async def writes_and_ends(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


def then_ends(data: bytes) -> Behaviour:
    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await writes_and_ends(data, writer)

    return behave


async def a_head_without_end(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """100 MB of it, unless somebody hangs up."""
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(1600):
        writer.write(b"x" * 65536)
        await writer.drain()


async def interim_answers_without_end(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
        await writer.drain()


REFUSED: dict[str, Behaviour] = {
    "too short": then_ends(head_of(b"Content-Length: 50") + b"{}"),
    "two lengths": writes(head_of(b"Content-Length: 2", b"Content-Length: 3") + b"{}}"),
    "length and chunks": writes(head_of(b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"),
    "unknown coding": writes(head_of(b"Transfer-Encoding: gzip") + b"{}"),
    "half a chunk": then_ends(head_of(b"Transfer-Encoding: chunked") + b"20\r\n{"),
    "no last chunk": then_ends(head_of(b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n"),
    "chunk too long": writes(head_of(b"Transfer-Encoding: chunked") + b"2\r\n{}}\r\n0\r\n\r\n"),
    "a line break in a header": writes(head_of(b"X: a\nSet-Cookie: evil=1", b"Content-Length: 2") + b"{}"),
    "a carriage return in a header": writes(head_of(b"X: a\rSet-Cookie: evil=1", b"Content-Length: 2") + b"{}"),
    "a folded header": writes(head_of(b"X: a", b" b: c", b"Content-Length: 2") + b"{}"),
    "a null": writes(head_of(b"X: a\x00b", b"Content-Length: 2") + b"{}"),
    "another protocol": writes(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n{}"),
    "interim answers without end": interim_answers_without_end,
    "a head without end": a_head_without_end,
    "only an interim answer": then_ends(b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "nothing": then_ends(b""),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_answer_that_is_broken_never_reaches_the_client(name: str) -> None:
    async with FakeReplica([REFUSED[name]]) as bad, FakeReplica() as good, running(bad, good, **TURNS) as run:
        while not bad.requests:
            async with dial(run) as (reader, writer):
                writer.write(post())
                status, headers, body = await read_answer(reader)
                assert (status, HELLO in body, "set-cookie" in headers) == (200, True, False)
        await served(run)


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "nothing"])  # that is tried again by itself
async def test_without_another_replica_the_client_gets_an_error(name: str) -> None:
    async with FakeReplica([REFUSED[name], answers()]) as bad, running(bad) as run:
        status, _, body = await run.post(RAW)
        assert (status, body["error"]["code"]) == (502, "replica_failed")
        assert "evil" not in str(body)
        await settled(run)


TAKEN: dict[str, bytes] = {
    "interim answers": b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 E\r\nLink: x\r\n\r\n" + http(200, b'{"a": 1}'),
    "chunks with extensions and trailers": head_of(b"Transfer-Encoding: chunked")
    + b'8;x="y"\r\n{"a": 1}\r\n0\r\nSet-Cookie: evil=1\r\n\r\n',
    "until the end": head_of() + b'{"a": 1}',
    "old": b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}',
}


@pytest.mark.parametrize("name", TAKEN)
async def test_what_is_unusual_but_clear_comes_through(name: str) -> None:
    async with FakeReplica([then_ends(TAKEN[name]), answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post())
            status, headers, body = await read_answer(reader)
            assert (status, body, "set-cookie" in headers) == (200, b'{"a": 1}', False)
        await served(run)


LIAR = http(200, b'{"not": "yours"}')


@pytest.mark.parametrize("apart", [False, True])
async def test_a_second_answer_is_nobodys(apart: bool) -> None:
    """One request, two answers: at once, or the second while the connection is idle."""

    async def twice(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await answers()(request, writer)
        if apart:
            await writer.drain()
            asyncio.get_running_loop().call_soon(lambda: writer.is_closing() or writer.write(LIAR))
        else:
            writer.write(LIAR)

    async with FakeReplica([twice]) as replica, running(replica) as run:
        for _ in range(20):
            status, _, body = await run.post(RAW)
            assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")
        assert replica.connections >= 20, "each connection was given up"
        await settled(run)


async def test_what_came_before_a_call_is_not_its_answer() -> None:
    """The bytes are in the kernel, but the event loop has not read them when the connection is to be used again."""
    sides: list[asyncio.StreamWriter] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sides.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = ConnectionPool(Dialer("127.0.0.1", server.sockets[0].getsockname()[1], None, Resolver()))
    connection = await pool.connect(5)
    connection.send(b"x", to_head=False, limits=UpstreamTimeouts(5, 5, 5))
    await eventually(lambda: sides)
    sides[0].write(http(200, b"{}"))
    await connection.wait()
    assert connection.take() == b"{}"
    pool.give_back(connection)
    assert repr(pool).endswith("1 idle>")
    raw = sides[0].get_extra_info("socket")
    with socket.socket(fileno=socket.dup(raw.fileno())) as plain:
        plain.send(LIAR)  # no turn of the event loop between this and the next line
    assert pool.idle() is None
    pool.close()
    sides[0].close()
    server.close()
    await server.wait_closed()


async def test_what_a_sink_raises_is_the_owners_and_no_failure_of_the_replica() -> None:
    """A client's connection may be closing when the replica's next bytes come."""
    async with FakeReplica([then_ends(head_of(b"Content-Length: 2") + b"{}")]) as replica:
        connection = await ConnectionPool(Dialer("127.0.0.1", replica.port, None, Resolver())).connect(5)
        connection.send(post(), to_head=False, limits=UpstreamTimeouts(5, 5, 5))

        def sink(_: bytes) -> None:
            raise ConnectionResetError("the client left")

        with pytest.raises(ConnectionResetError, match="the client left"):
            await connection.pump(sink)
        assert not connection.alive


async def test_an_early_answer_to_a_large_request_ends_the_connection() -> None:
    """The replica answers at the head and never reads the body: the rest of it must not become the next request."""
    heads: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                if heads[-1].startswith(b"GET /v1/models "):
                    writer.write(http(200, b'{"data": [{"id": "m"}]}'))
                elif heads[-1].startswith(b"GET "):
                    writer.write(http(404, b"{}"))
                else:
                    writer.write(http(413, b'{"error": {"message": "too much"}}'))
                    writer.transport.pause_reading()
                    return

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
    large = json.dumps({**BODY, "user": "POST /v1/canary HTTP/1.1\r\n" * 300_000}).encode()
    async with running(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as run:
        for _ in range(2):
            async with dial(run) as (reader, writer):
                writer.write(post(large))
                assert (await read_answer(reader))[0] == 413
        assert all(head.split(b" ")[1] != b"/v1/canary" for head in heads)
        assert sum(head.startswith(b"POST") for head in heads) == 2
        await settled(run)
    for writer in writers:
        writer.transport.abort()
    server.close()
    await server.wait_closed()


async def test_a_late_answer_goes_to_nobody() -> None:
    given_up = asyncio.Event()

    async def late(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await given_up.wait()
        writer.write(LIAR)

    async with FakeReplica([late, answers()]) as replica, running(replica, timeouts={"first_byte_s": 0.5}) as run:
        status, _, body = await run.post(RAW)
        assert (status, body["error"]["code"]) == (504, "timeout")
        given_up.set()
        await served(run)


def drips(data: bytes, pieces: int) -> Behaviour:
    """Write `data` over and over, a few bytes at a time, as fast as it is taken."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        for _ in range(pieces):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.01)

    return behave


@pytest.mark.parametrize("data", [b"HTTP/1.1 100 C\r\n\r\n", b""])
async def test_signs_of_life_are_no_answer(data: bytes) -> None:
    """A replica that drips its head, or interim answers, has first_byte_s for it all, not for each byte."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(data or b"HTTP/1.1 200 OK\r\nX: ")
        await drips(data or b"x", 4000)(request, writer)

    async with FakeReplica([behave, answers()]) as replica, running(replica, timeouts={"first_byte_s": 0.2}) as run:
        async with asyncio.timeout(30):  # less than the drips take
            status, _, body = await run.post(RAW)
        assert (status, body["error"]["code"]) == (504, "timeout")
        await served(run)


async def test_the_status_of_a_dripping_error_is_not_held_for_its_body() -> None:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: 4000\r\n\r\n")
        await drips(b"x", 4000)(request, writer)

    async with FakeReplica([behave, answers()]) as replica, running(replica, timeouts={"idle_s": 0.2}) as run:
        async with asyncio.timeout(30), dial(run) as (reader, writer):  # less than the drips take
            writer.write(post())
            assert b" 400 " in await reader.readline()
        await served(run)


async def test_a_long_prefill_after_the_head_is_waited_for() -> None:
    """Engines send a stream's head at once and its first event when the prompt is read: that is first_byte_s, not idle_s."""
    ready = asyncio.Event()

    async def slow(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        await writer.drain()
        asyncio.get_running_loop().call_later(0.3, ready.set)
        await ready.wait()
        writer.write(chunk(event("a")) + chunk(DONE) + b"0\r\n\r\n")

    async with FakeReplica([slow, answers()]) as replica, running(replica, timeouts={"idle_s": 0.1}) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            status, _, body = await read_answer(reader)
            assert (status, body.count(b"[DONE]"), b"error" in body) == (200, 1, False)
        await served(run)


def pings(count: int, *then: bytes, pause_s: float = 0.0) -> Behaviour:
    """Keep-alive comments, then events, then the end."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(count):
            writer.write(chunk(b": ping\n\n"))
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.write(b"".join(map(chunk, then)) + b"0\r\n\r\n")

    return behave


async def test_a_comment_is_no_first_token(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """An engine in prefill keeps the connection alive with comments: only its first data shows how long the prefill took."""
    slow = pings(4, event("a"), event(usage=usage(2000, 1, 0)), DONE, pause_s=0.1)
    body = json.dumps(
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "word" * 2000}],
        }
    )
    async with FakeReplica([slow]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(body.encode()))
            status, _, answer = await read_answer(reader)
        assert (status, answer.count(b": ping"), answer.count(b"[DONE]")) == (200, 4, 1)
        assert request_lines()[0]["ttft_s"] >= 0.4
        assert run.gateway.router.ledger.of(replica.name).rate.value < 8000


ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
OOM = b'data: {"error": {"code": 500, "message": "oom"}}\n\n'


def breaks_off(*before: bytes) -> Behaviour:
    """Keep-alives and events, then the connection ends."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunk, before)))
        await writer.drain()
        writer.write_eof()

    return behave


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (pings(3), "without its last event"),
        (pings(1, b": ping\n\n" * 3000), "without its last event"),
        (pings(1, OOM), "oom"),
        (pings(0, ROLE, b": ping\n\n", OOM), "oom"),
        (pings(0, ROLE + OOM), "oom"),
        (breaks_off(b": ping\n\n"), "within the answer"),
        (breaks_off(ROLE, b"\n", b"data: {"), "within the answer"),
    ],
)
async def test_a_stream_that_fails_before_its_first_token_goes_to_another_replica(
    bad: Behaviour, why: str, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """The client has signs of life only, and one role."""
    good = pings(0, ROLE, event("a"), event("b", "stop"), DONE)
    async with (
        FakeReplica([bad, good]) as replica,
        FakeReplica([good]) as other,
        running(replica, other, **TURNS) as run,
    ):
        for _ in range(2):
            async with dial(run) as (reader, writer):
                writer.write(post(STREAM))
                status, _, body = await read_answer(reader)
                found = status, body.count(ROLE), body.count(b'"content": "a"'), body.count(b"[DONE]"), b"error" in body
                assert found == (200, 1, 1, 1, False)
        (failed,) = [attempt for line in request_lines() for attempt in line.get("failed_attempts", ())]
        assert why in failed["error"]
        await settled(run)


@pytest.mark.parametrize(
    ("alive", "pause"),
    [(b": ping\n\n", b""), (b":\n", b""), (b"\n", b""), (ROLE, b""), (b"data: ", b'{"choices": []}\n\n')],
    ids=["comment", "line", "blank", "role", "half an event"],
)
async def test_every_byte_is_a_sign_of_life(alive: bytes, pause: bytes) -> None:
    """A prefill takes several times as long as the longest silence."""

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(8):
            for part in (alive, pause):
                if part:
                    writer.write(chunk(part))
                    await writer.drain()
                    await asyncio.sleep(0.15)
        writer.write(chunk(event("a", "stop")) + chunk(DONE) + b"0\r\n\r\n")

    async with (
        FakeReplica([behave]) as replica,
        FakeReplica([behave]) as other,
        running(replica, other, timeouts={"first_byte_s": 0.6, "idle_s": 0.1}, **TURNS) as run,
    ):
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            status, _, body = await read_answer(reader)
        assert (status, body.count(b"[DONE]"), b"error" in body) == (200, 1, False)
        assert len(replica.requests) + len(other.requests) == 1


async def test_signs_of_life_pass_at_once() -> None:
    """The client, and the proxies before it, have their own limits for silence."""
    go_on = asyncio.Event()

    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b": ping\n\n"))
        await writer.drain()
        await go_on.wait()
        writer.write(chunk(event("a", "stop")) + chunk(DONE) + b"0\r\n\r\n")

    async with FakeReplica([behave]) as replica, running(replica) as run, dial(run) as (reader, writer):
        writer.write(post(STREAM))
        assert b": ping\n\n" in await reader.readuntil(b": ping\n\n")
        go_on.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"[DONE]") == 1


@pytest.mark.parametrize("began", [b"", b": ping\n\n", ROLE], ids=["nothing", "comment", "role"])
@pytest.mark.parametrize("stream", [True, False])
async def test_silence_at_a_live_replica_ends_the_request(
    began: bytes, stream: bool, request_lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Another replica would compute the same prompt for as long."""

    async def silent(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if stream and began:
            writer.write(STREAM_HEAD + chunk(began))
        await asyncio.Event().wait()

    async with FakeReplica([silent]) as one, FakeReplica([silent]) as two:
        pools = [{"replicas": [one.url, two.url], "resume_streams": True}]
        async with running(pools=pools, timeouts={"first_byte_s": 0.2, "idle_s": 0.1}, **TURNS) as run:
            async with dial(run) as (reader, writer):
                writer.write(post(STREAM if stream else RAW))
                status, _, body = await read_answer(reader)
            assert status == (200 if stream and began else 504)
            assert b"timeouts.first_byte_s" in body
            assert len(one.requests) + len(two.requests) == 1
            (line,) = request_lines()
            assert len(line["failed_attempts"] if status == 504 else [line]) == 1
            assert "nothing came for 0.2 s (timeouts.first_byte_s)" in line["error"]
            assert "a time limit ended a request" in caplog.text
            await settled(run)


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"])
@pytest.mark.parametrize("resume", [False, True])
async def test_a_stream_may_end_without_a_blank_line(end: bytes, resume: bool) -> None:
    """Distributed-Llama's server writes the last event so."""
    async with (
        FakeReplica([pings(0, event("a"), end)]) as replica,
        running(pools=[{"replicas": [replica.url], "resume_streams": resume}]) as run,
    ):
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            status, _, body = await read_answer(reader)
        assert (status, body) == (200, event("a") + end)
        assert not [name for name in await run.metrics() if name.startswith("warmroute_broken_responses_total{")]
        chunks = [piece async for piece in await run.client.chat.completions.create(**BODY, stream=True)]
        assert [piece.choices[0].delta.content for piece in chunks] == ["a"]


async def test_silence_in_a_stream_is_noticed_in_time() -> None:
    """Also where first_byte_s is much longer than idle_s."""
    never = asyncio.Event()
    async with (
        FakeReplica([streams("a", "b", hold=never), answers()]) as replica,
        running(replica, timeouts={"idle_s": 0.1, "first_byte_s": 300}) as run,
    ):
        async with dial(run) as (reader, writer), asyncio.timeout(40):
            writer.write(post(STREAM))
            _, _, body = await read_answer(reader)
            assert b"nothing came for 0.1 s" in body
        await served(run)


@pytest.mark.parametrize("begin", [b"", b"{"], ids=["nothing", "begun"])
async def test_silence_in_an_error_ends_the_request(begin: bytes) -> None:
    """The words of an error are read before the client gets its status."""

    async def stalls(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1000\r\n\r\n" + begin)
        await asyncio.Event().wait()

    limits = {"first_byte_s": 0.2, "idle_s": 0.2}
    async with FakeReplica([stalls, answers()]) as replica, running(replica, timeouts=limits) as run:
        status, _, error = await run.post(BODY)
        assert (status, error["error"]["code"]) == (504, "timeout")
        assert "nothing came for 0.2 s" in error["error"]["message"]
        await served(run)


@pytest.mark.parametrize("code", [204, 304])
async def test_a_body_where_there_can_be_none_is_dropped(code: int) -> None:
    bad = writes(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (code, len(LIAR)) + LIAR)
    async with FakeReplica([bad, answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post() + post())
            first, second = await read_answer(reader), await read_answer(reader)
            assert (first[0], first[2], second[0]) == (code, b"", 200)
            assert HELLO in second[2]
        await served(run)


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b""])
async def test_a_body_in_the_answer_to_a_head_is_dropped(framing: bytes) -> None:
    bad = writes(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\nhello")
    async with FakeReplica([bad, answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(b"HEAD /v1/files HTTP/1.1\r\nHost: h\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(post())
            assert (head[:15], (await read_answer(reader))[0]) == (b"HTTP/1.1 200 OK", 200)
        await served(run)


async def test_a_stream_that_breaks_in_a_chunk_ends_with_an_error() -> None:
    async def half(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")))
        await writes_and_ends(b"ff\r\nhalf", writer)

    async with FakeReplica([half, answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            status, _, body = await read_answer(reader)
            assert (status, body.count(b"data: "), b"half" in body) == (200, 3, False)  # event, error, [DONE]
            assert b"replica_failed" in body
        await served(run)


# -- clients


async def test_three_requests_at_once_are_answered_in_order() -> None:
    script = [answers("one"), answers("two"), answers()]
    async with FakeReplica(script) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post() * 3)
            found = [await read_answer(reader) for _ in range(3)]
        assert [json.loads(body)["choices"][0]["message"]["content"] for _, _, body in found] == ["one", "two", "hello"]
        await served(run)


@pytest.mark.parametrize(
    ("request_bytes", "kept"),
    [
        (post(), True),
        (post(RAW, b"Connection: close"), False),
        (post(version=b"1.0"), False),
        (post(RAW, b"Connection: keep-alive", version=b"1.0"), True),
        (post(STREAM), True),
        (post(STREAM, b"Connection: keep-alive", version=b"1.0"), False),
    ],
)
async def test_which_requests_keep_the_connection(request_bytes: bytes, kept: bool) -> None:
    streaming = STREAM in request_bytes
    async with FakeReplica([streams("a") if streaming else answers(), answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(request_bytes)
            if kept:
                assert (await read_answer(reader))[0] == 200
                writer.write(post(RAW, b"Connection: close"))
            data = await reader.read()
            assert data.count(b"HTTP/1.1 200 OK") == 1
            assert (b"[DONE]" if streaming and not kept else HELLO) in data
            assert b"Transfer-Encoding" not in data or not kept
        await served(run)


async def test_expect_is_answered_before_the_body() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            head, _, body = post(RAW, b"Expect: 100-continue").partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert not replica.requests
            writer.write(body)
            assert HELLO in (await read_answer(reader))[2]
            assert "expect" not in replica.requests[0].headers
        await served(run)


async def test_other_expectations_are_refused() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for value in (b"something", b"\x90e"):
            async with dial(run) as (reader, writer):
                writer.write(post(RAW, b"Expect: " + value) + post())
                status, _, body = await read_answer(reader)
                assert (status, json.loads(body)["error"]["code"]) == (417, "invalid_http")
                assert await reader.read() == b""
        assert not replica.requests
        await served(run)


@pytest.mark.parametrize("line", [b"GET /health", b"POST /v1/chat/completions HTTP/0.9", b"POST /v1/chat/completions HTTP/2.0"])
async def test_other_versions_are_not_spoken(line: bytes) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(line + post().removeprefix(b"POST /v1/chat/completions HTTP/1.1"))
            data = await reader.read()
            assert data.startswith((b"HTTP/1.1 505 ", b"HTTP/1.0 400 "))
            assert data.count(b"HTTP/") == 1
        assert not replica.requests
        await served(run)


async def test_a_body_that_nobody_wants_and_that_is_broken_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """It is not decompressed; one whose framing is broken ends the connection."""
    head = b"GET /health HTTP/1.1\r\nHost: h\r\n"
    async with FakeReplica() as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(head + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nhuhu")
            assert (await read_answer(reader))[0] == 200
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\nhuhu")
            assert (await read_answer(reader))[0] in (200, 400)
            await reader.read()
        await served(run)
    assert not [record for record in caplog.records if record.exc_info]


Stage = Callable[[asyncio.StreamReader, asyncio.StreamWriter, FakeReplica], Awaitable[None]]


async def after_the_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: FakeReplica) -> None:
    writer.write(post().partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    await writer.drain()


async def in_the_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: FakeReplica) -> None:
    writer.write(post()[:40])
    await writer.drain()


async def in_the_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: FakeReplica) -> None:
    writer.write(post()[:-10])
    await writer.drain()


async def before_the_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, replica: FakeReplica) -> None:
    writer.write(post())
    await eventually(lambda: replica.requests)


async def in_the_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: FakeReplica) -> None:
    writer.write(post(STREAM))
    await reader.readuntil(b"data: ")


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stage", [in_the_head, after_the_head, in_the_body, before_the_answer, in_the_stream])
async def test_a_client_may_vanish_at_any_time(stage: Stage, reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    never = asyncio.Event()
    first: Behaviour = streams("a", "b", hold=never) if stage is in_the_stream else hangs(never)
    script = [first, answers()] if stage in (before_the_answer, in_the_stream) else [answers()]
    async with FakeReplica(script) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            await stage(reader, writer, replica)
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        if len(script) == 2:
            await eventually(lambda: replica.gone == 1)
        await served(run)
        assert all(state.up for state in run.gateway.fleet.replicas)
    assert not [record for record in caplog.records if record.exc_info]


FLOOD = chunk(event("x" * 60_000))


async def test_a_client_that_does_not_read_fills_no_memory_and_holds_nobody_up() -> None:
    """The replica's connection is paused: what it can write is what the buffers hold, far from what it wants to write."""
    written = 0
    stopped = asyncio.Event()

    async def flood(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(STREAM_HEAD)
        with contextlib.suppress(ConnectionError):
            while written < 500 << 20:
                writer.write(FLOOD)
                try:
                    async with asyncio.timeout(0.5):
                        await writer.drain()
                except TimeoutError:
                    stopped.set()
                    await writer.drain()
                written += len(FLOOD)

    async with FakeReplica([flood, answers()]) as replica, running(replica) as run:
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            await reader.readuntil(b"data: ")
            await stopped.wait()
            assert written < 64 << 20
            for _ in range(3):
                assert (await run.post(RAW))[0] == 200
            assert run.gateway.router.ledger.open_leases == 1
            before, read = written, 0
            while written <= before:  # it goes on when the client does
                read += len(await reader.read(1 << 16))
        await served(run)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("body", [STREAM, b"x"], ids=["generation", "passed through"])
async def test_a_client_that_stops_reading_is_not_the_replicas_fault(
    body: bytes, resume: bool, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """It is given up after `idle_s`, as if it had left: the replica's breaker, metrics and cached prompt stay as they are."""

    async def flood(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")))
        while True:
            writer.write(chunk(event("x" * 1000)) * 64)
            await writer.drain()

    path = b"/v1/chat/completions" if body == STREAM else b"/v1/files"
    async with FakeReplica([flood, answers()]) as replica, FakeReplica([answers()]) as other:
        pools = [{"replicas": [replica.url], "resume_streams": resume}, {"models": ["other"], "replicas": [other.url]}]
        async with running(pools=pools, timeouts={"idle_s": 0.2}) as run:
            sent = body if body == STREAM else b'{"model": "m", "x": "y"}'
            async with unread(run, post(sent, path=path)):
                await eventually(request_lines)
                await settled(run)
            (line,) = request_lines()
            assert (line["status"], line["error"]) == (499, "the client has not read for 0.2 s")
            assert not line.get("failed_attempts")
            metrics = await run.metrics()
            assert not [
                name for name in metrics if name.startswith(("warmroute_broken_responses_total{", "warmroute_resumed_"))
            ]
            state = run.gateway.fleet.named(replica.name)
            assert state is not None
            assert not state.probe_now.is_set()
            assert repr(state.breaker) == "<Breaker closed, 0 of 1 failed>"
            await served(run)


async def test_a_client_that_stops_reading_until_the_answers_time_is_over_is_not_the_replicas_fault(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    async def flood(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(event("x" * 1000)) * 64)
            await writer.drain()

    async with FakeReplica([flood, answers()]) as replica, running(replica, timeouts={"total_s": 3}) as run:
        async with unread(run, post(STREAM)):
            await eventually(request_lines)
        (line,) = request_lines()
        assert (line["status"], line["error"]) == (
            499,
            "the answer took longer than 3 s, and the client has not read for a while",
        )
        assert not [name for name in await run.metrics() if name.startswith("warmroute_broken_responses_total{")]
        await served(run)


@pytest.mark.parametrize("resume", [False, True])
async def test_a_replica_that_gives_up_a_client_who_does_not_read_is_not_blamed(resume: bool) -> None:
    """As a server does that cannot write for too long. The gateway reads of it when the client reads again."""
    gave_up = asyncio.Event()

    async def gives_up(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if gave_up.is_set():
            await streams("rest")(request, writer)
            return
        writer.write(STREAM_HEAD + chunk(event("x" * 1000)) * 20_000)
        before, turns = -1, 0
        while turns < 150:  # no progress in 150 looks: more than a second, and the gateway had its turns
            await asyncio.sleep(0.01)
            left = writer.transport.get_write_buffer_size()
            before, turns = left, turns + 1 if left == before else 0
        assert before
        dies_now(writer)
        gave_up.set()

    async with FakeReplica([gives_up]) as one, FakeReplica([gives_up]) as two:
        pools = [{"replicas": [one.url, two.url], "resume_streams": resume}]
        async with running(pools=pools) as run:
            async with asyncio.timeout(40), unread(run, post(STREAM)) as client:
                await gave_up.wait()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # else it takes a minute
                got = b""
                while not got.endswith(b"0\r\n\r\n"):
                    data = await asyncio.get_running_loop().sock_recv(client, 1 << 20)
                    assert data, "it is cut"
                    got = got[-100:] + data
            assert DONE in got
            assert all("closed, 0 of" in repr(state.breaker) for state in run.gateway.fleet.replicas)
            assert not [name for name in await run.metrics() if name.startswith("warmroute_broken_responses_total{")]


# -- clients that take their time


@pytest.mark.parametrize("before", [b"", post()])
async def test_a_head_that_comes_byte_by_byte_has_a_limited_time(before: bytes) -> None:
    async with FakeReplica() as replica, running(replica, limits={"client_idle_s": 0.2}) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(run.url.rpartition(":")[2]))
        async with asyncio.timeout(40):
            writer.write(before)
            if before:
                assert (await read_answer(reader))[0] == 200
            with contextlib.suppress(ConnectionError):
                for byte in post()[:60] * 100:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.01)
                    if reader.at_eof() or writer.is_closing():
                        break
                else:
                    pytest.fail("it was never given up")
        writer.transport.abort()


async def test_a_body_that_comes_byte_by_byte_has_a_limited_time() -> None:
    async with FakeReplica() as replica, running(replica, limits={"body_s": 0.2}) as run:
        async with dial(run) as (reader, writer):
            answer: Any = asyncio.ensure_future(read_answer(reader))
            head, _, body = post().partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            for byte in body[:-1] * 100:
                if answer.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
            assert (await answer)[0] == 408
        assert not replica.requests
        await served(run)


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with FakeReplica() as replica, running(replica, limits={"client_idle_s": 0.1}) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(run.url.rpartition(":")[2]))
        async with asyncio.timeout(40):
            assert await reader.read() == b""
        writer.close()


async def test_a_replica_that_dies_in_the_answers_to_many_leaves_nothing(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    async def dies_late(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(event("a")))
        await writer.drain()
        dies_now(writer)

    async def one(run: Running) -> tuple[int, bytes]:
        async with dial(run) as (reader, writer):
            writer.write(post(STREAM))
            code, _, body = await read_answer(reader)
            return code, body

    async with FakeReplica([*[dies_late] * 20, answers()]) as replica, running(replica) as run:
        got = await asyncio.gather(*(one(run) for _ in range(20)))
        assert [code for code, _ in got] == [200] * 20
        for _, body in got:
            assert body.startswith(event("a"))
            assert b'"replica_failed"' in body
            assert body.endswith(DONE)
        await eventually(lambda: len(request_lines()) == 20)
        assert all(line["status"] == 200 and "failed while it answered" in line["error"] for line in request_lines())
        await settled(run)
