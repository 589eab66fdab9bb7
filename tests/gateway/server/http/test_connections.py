"""Plain requests go past aiohttp, all others through it, a connection may bring both: the seam that `client.py` names."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.client import ClientRequest
from gateway.server.bounds import MAX_UNCHARGED
from gateway.server.http.aiohttp_request import AiohttpRequest
from gateway.server.http.connection import ClientConnection
from gateway.server.http.connections import ClientServer
from gateway.server.http.fast_path import MAX_PIPELINED
from gateway.server.http.plain_request import MAX_FIELDS, MAX_HEAD_BYTES, PlainRequest, read_head
from gateway.upstream.http1 import Answer
from tests.gateway.conftest import eventually
from tests.gateway.servers import serving

CHAT = "/v1/chat/completions"
Handler = Callable[[Any], Awaitable[Any]]


def post(body: bytes, *fields: str, path: str = CHAT, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: h", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


GET = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


async def echo(request: ClientRequest) -> Any:
    """Answers with the request's way (plain or aiohttp), its path and its body."""
    body = await request.read(max_bytes=1 << 20, within_s=60, opaque=False)
    reply = request.reply(keep_alive=True, patience_s=5)
    way = b"plain" if isinstance(request, PlainRequest) else b"aiohttp"
    text = b"%b %b %b" % (way, request.path.encode(), body)
    reply.begin(200, b"", length=len(text), first=text)
    return reply


async def ask(
    port: int, pieces: Sequence[bytes], answers: int, *, in_turn: ClientServer | None = None, pause_s: float = 0.001
) -> list[bytes]:
    """The bodies of `answers` answers to what is sent piece by piece. in_turn: the server; each piece brings an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[bytes] = []
    rest = b""

    async def read(until: int) -> None:
        nonlocal rest
        while len(found) < until:
            answer = Answer()
            body = answer.feed(rest) if rest else b""
            while not answer.complete:
                data = await reader.read(1 << 20)
                assert data, found
                body += answer.feed(data)
            rest = answer.rest
            found.append(body)

    async with asyncio.timeout(40):
        for number, piece in enumerate(pieces, 1):
            writer.write(piece)
            await asyncio.sleep(pause_s)  # a client that takes its time: what is sent at once would be read at once
            if in_turn:
                await read(number)
                await eventually(lambda: all(each.idle for each in in_turn.connections))  # aiohttp is done with it, too
        await read(answers)
    writer.close()
    return found


@pytest.mark.parametrize(
    ("pieces", "ways"),
    [
        ([post(b"a")], ["plain"]),
        ([post(b"a"), post(b"b"), post(b"c")], ["plain"] * 3),
        ([post(b"a") + post(b"b") + post(b"c")], ["plain"] * 3),
        ([post(b"a" * 9)[:-4], b"aaa", b"a" + post(b"b")], ["plain"] * 2),
        ([GET, post(b"a"), GET, post(b"b")], ["aiohttp", "plain"] * 2),
        ([post(b"a", path="/v1/embeddings"), post(b"b")], ["aiohttp", "plain"]),
        ([post(b"a"), CHUNKED, post(b"b")], ["plain", "aiohttp", "aiohttp"]),
        ([post(b"a", "Connection: keep-alive"), post(b"")], ["plain", "aiohttp"]),
        ([post(b"a")[:30], post(b"a")[30:], post(b"b")], ["aiohttp", "aiohttp"]),
        ([GET + GET[:9], GET[9:], post(b"b")], ["aiohttp"] * 3),
        ([GET + post(b"a"), post(b"b")], ["aiohttp"] * 3),
    ],
)
async def test_which_way_requests_go(pieces: list[bytes], ways: list[str]) -> None:
    async with serving(echo) as (front, port):
        found = await ask(port, pieces, len(ways), in_turn=front if len(pieces) == len(ways) else None, pause_s=0.05)
    assert [body.split()[0].decode() for body in found] == ways


@settings(max_examples=40)
@given(st.lists(st.sampled_from([post(b"a"), post(b"bb" * 99), GET, CHUNKED, post(b"c", path="/x")]), min_size=1), st.data())
async def test_any_cutting_gives_the_same_answers(requests: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(requests)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=4)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    bodies = {post(b"a"): b"a", post(b"bb" * 99): b"bb" * 99, GET: b"", CHUNKED: b"hi", post(b"c", path="/x"): b"c"}
    async with serving(echo) as (_, port):
        found = await ask(port, pieces, len(requests))
    assert [body.split(b" ")[2] for body in found] == [bodies[one] for one in requests]


@pytest.mark.parametrize(
    "data",
    [
        post(b"a", version="1.0"),
        post(b"a", method="post"),
        post(b"a", "Expect: 100-continue"),
        post(b"a", "Connection: close"),
        post(b"a", "connection: keep-alive, x"),
        post(b"a", "Transfer-Encoding: chunked"),
        post(b"a", "Content-Encoding: gzip"),
        post(b"a", "Upgrade: h2c"),
        post(b"a", "content-length: 1"),
        post(b"a", "X: 1", "x: 2"),
        post(b"a", "X : 1"),
        post(b"a", "X:"),
        post(b"a", "X:  1"),
        post(b"a", "X: 1 "),
        post(b"a", "X: \t1"),
        post(b"a", "X: \xe9"),
        post(b"a", " folded"),
        post(b"a", "X"),
        post(b"a", *(f"X{number}: 1" for number in range(MAX_FIELDS))),
        post(b"a", "X: " + "1" * MAX_HEAD_BYTES),
        post(b"a").replace(b"Host: h\r\n", b""),
        post(b"a").replace(b"Length: 1", b"Length: +1"),
        post(b"a").replace(b"Length: 1", b"Length: 1, 1"),
        post(b"a").replace(b"Length: 1\r\n", b"Length: 1\r\n 1\r\n"),
        post(b"a").replace(b"\r\n", b"\n"),
        b"\r\n" + post(b"a"),
        post(b"a", path="x"),
        post(b"a", path="/\xff"),
        b"",
    ],
)
def test_what_is_not_plain(data: bytes) -> None:
    assert read_head(data) is None


def test_a_plain_head() -> None:
    data = post(b"hello", "Authorization: Bearer a b", "X-Request-Id:7", "connection: Keep-Alive")
    for length in (b"Content-Length", b"content-length"):
        begun = read_head(data.replace(b"Content-Length", length) + b"more")
        assert begun
        assert (begun.length, data[begun.end :], begun.head.method, begun.head.target) == (5, b"hello", "POST", CHAT)
        assert begun.head.headers[1:3] == [(b"Authorization", b"Bearer a b"), (b"X-Request-Id", b"7")]
        for _ in range(2):  # the second time it is known
            assert (begun.head.fields.get("x-request-ID"), begun.head.fields.get("X-Other")) == ("7", None)


async def test_the_client_leaves() -> None:
    """Its handler is cancelled, whether it waits for the body or for the answer."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: PlainRequest) -> Any:
        begun.set()
        try:
            await request.read(max_bytes=1 << 20, within_s=60, opaque=False)
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with serving(handler) as (front, port):
        for data in (post(b"a"), post(b"aaa")[:-1]):
            begun.clear()
            ended.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            async with asyncio.timeout(40):
                await begun.wait()
                assert not ended.is_set()
                writer.close()
                await ended.wait()
            assert ended.is_set()
            await eventually(lambda: not front.connections)


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def slow(request: PlainRequest) -> Any:
        await asyncio.sleep(0.3)
        return await echo(request)

    async with serving(slow, idle_s=0.1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"a"))
        async with asyncio.timeout(40):
            assert (await reader.read()).endswith(b"plain /v1/chat/completions a")
        writer.close()


async def test_the_last_answer_closes_the_connection() -> None:
    async def last(request: PlainRequest) -> Any:
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=0)
        return reply

    async with serving(last) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"a") + post(b"b"))
        async with asyncio.timeout(40):
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
        writer.close()


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_closed_connection_whose_client_does_not_read_ends(keep_alive: bool) -> None:
    """Too little is left of the answer to wait for the client before the connection is closed."""
    unsent = 0

    async def handler(request: PlainRequest) -> Any:
        nonlocal unsent
        reply = request.reply(keep_alive=keep_alive, patience_s=5)
        reply.begin(200, b"", length=None)
        while not (unsent := request.connection.transport.get_write_buffer_size()):
            reply.write(b"x" * 1000)
        reply.end()
        return reply

    async with serving(handler, idle_s=0.2) as (front, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(post(b"a"))
        await eventually(lambda: unsent)
        assert unsent < MAX_UNCHARGED
        await eventually(lambda: not front.connections and not front.connection_limit.open)
        writer.close()


async def test_an_http_1_0_client_that_does_not_read_the_end_of_its_answer_is_reset() -> None:
    """Its answer has no length: a plain end would look like that of a complete answer."""
    unsent = 0

    async def handler(request: AiohttpRequest) -> Any:
        nonlocal unsent
        transport = request.inner.transport
        assert transport
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=None)
        while not (unsent := transport.get_write_buffer_size()):  # type: ignore[attr-defined]
            reply.write(b"x" * 1000)
        reply.end()
        return reply

    async with serving(handler, idle_s=0.2) as (front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(post(b"a", version="1.0"))
        await eventually(lambda: unsent)
        await eventually(lambda: not front.connections)
        writer.transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_a_body_that_is_too_large_is_refused_by_aiohttp() -> None:
    async def handler(request: ClientRequest) -> Any:
        assert isinstance(request, AiohttpRequest)
        return web.Response(status=413)

    async with serving(handler) as (_, port):
        await ask(port, [post(b"x" * ((1 << 20) + 1))], 1)


async def test_what_comes_behind_a_request_is_bounded() -> None:
    """The connection is not read while much waits behind a request, and what waits is served after it."""
    go = asyncio.Event()

    async def handler(request: PlainRequest) -> Any:
        await go.wait()
        return await echo(request)

    many = 40
    async with serving(handler) as (front, port):
        body = b"x" * MAX_PIPELINED
        asking = asyncio.create_task(ask(port, [post(body) * many], many))
        await eventually(lambda: front.connections and front.connections[0]._fast._held)
        go.set()
        assert await asking == [b"plain /v1/chat/completions " + body] * many


async def test_aiohttp_has_what_the_seam_needs() -> None:
    async with serving(echo) as (front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        connection = front.connections[0]
        assert isinstance(connection, ClientConnection)
        assert connection.transport
        assert connection.transport.get_write_buffer_limits()[1] == MAX_UNCHARGED
        await eventually(lambda: connection.waiter and not connection.waiter.done())
        assert not connection.messages
        assert (connection.closes, connection.closes_at_once) == (False, False)
        assert connection.idle_until > asyncio.get_running_loop().time()
        assert connection._keepalive_handle is not None
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()


async def test_an_idle_connection_does_not_keep_its_last_answer() -> None:
    body = bytes(range(256)) * 4096
    before = sys.getrefcount(body)

    async def answer(_request: ClientRequest) -> web.Response:
        return web.Response(body=body)

    async with serving(answer) as (_, port):
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, writer in ends:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(body)) == body
        await eventually(lambda: sys.getrefcount(body) == before)
        for _, writer in ends:
            writer.close()
