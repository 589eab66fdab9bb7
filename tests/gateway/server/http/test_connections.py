"""A connection: requests of every framing in any cutting, its ends, and its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.server.http.connection import MAX_PIPELINED, MAX_UNCHARGED
from gateway.server.http.connections import ClientServer
from gateway.server.http.request import HttpRequest
from gateway.server.http.request_head import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES, read_head
from gateway.upstream.http1 import MAX_TRAILER_BYTES, AnswerParser
from tests.gateway.conftest import eventually
from tests.gateway.servers import serving

CHAT = "/v1/chat/completions"
Handler = Callable[[Any], Awaitable[Any]]


def post(body: bytes, *fields: str, path: str = CHAT, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: h", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


GET = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


async def echo(request: HttpRequest) -> Any:
    """Answers with the request's method, its path and its body."""
    body = await request.read(max_bytes=1 << 20, within_s=60, opaque=False)
    reply = request.reply(keep_alive=True, patience_s=5)
    text = b"%b %b %b" % (request.method.encode(), request.path.encode(), body)
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
            answer = AnswerParser()
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
                await eventually(lambda: all(each.idle for each in in_turn.connections))
        await read(answers)
    writer.close()
    return found


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [
        ([post(b"a"), post(b"b"), post(b"c")], [b"POST a", b"POST b", b"POST c"]),
        ([post(b"a") + post(b"b") + post(b"c")], [b"POST a", b"POST b", b"POST c"]),
        ([post(b"a" * 9)[:-4], b"aaa", b"a" + post(b"b")], [b"POST aaaaaaaaa", b"POST b"]),
        ([GET, post(b"a"), GET, post(b"b")], [b"GET ", b"POST a", b"GET ", b"POST b"]),
        ([post(b"a"), CHUNKED, post(b"b")], [b"POST a", b"POST hi", b"POST b"]),
        ([post(b"a", "Connection: keep-alive"), post(b"")], [b"POST a", b"POST "]),
        ([post(b"a")[:30], post(b"a")[30:], post(b"b")], [b"POST a", b"POST b"]),
        ([GET + GET[:9], GET[9:], post(b"b")], [b"GET ", b"GET ", b"POST b"]),
        ([GET + CHUNKED[:-9], CHUNKED[-9:] + post(b"b")], [b"GET ", b"POST hi", b"POST b"]),
        ([b"\r\n" + GET + b"\r\n\r\n" + post(b"a")], [b"GET ", b"POST a"]),
    ],
)
async def test_requests_of_every_framing_on_one_connection(pieces: list[bytes], answers: list[bytes]) -> None:
    async with serving(echo) as (front, port):
        found = await ask(port, pieces, len(answers), in_turn=front if len(pieces) == len(answers) else None, pause_s=0.05)
    assert [b" ".join(body.split(b" ")[::2]) for body in found] == answers


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
        post(b"a", method="post"),
        post(b"a", method="X" * 30),
        post(b"a", version="2.0"),
        post(b"a", version="1.2"),
        post(b"a", "Expect: more"),
        post(b"a", "Transfer-Encoding: chunked"),
        post(b"a", "content-length: 1"),
        post(b"a", "CONTENT-LENGTH: 1"),
        post(b"a").replace(b"Content-Length: 1", b"Content-LENGTH: 1\r\nContent-LENGTH: 1"),
        post(b"a", "Host: i"),
        post(b"a", "Content-Type: a", "content-type: a"),
        post(b"a", "X : 1"),
        post(b"a", ": 1"),
        post(b"a", "X: \x00"),
        post(b"a", "X: a\rb"),
        post(b"a", "X: a\nb"),
        post(b"a", " folded"),
        post(b"a", "X"),
        post(b"a", *(f"X{number}: 1" for number in range(MAX_FIELDS))),
        post(b"a", "X: " + "1" * MAX_HEAD_BYTES),
        post(b"a").replace(b"Length: 1", b"Length: +1"),
        post(b"a").replace(b"Length: 1", b"Length: 1, 1"),
        post(b"a").replace(b"Length: 1", b"Length: 1\t"),
        post(b"a").replace(b"Length: 1", b"Length:"),
        post(b"a").replace(b"Length: 1", b"Length: 1000000000000"),
        post(b"a").replace(b"Length: 1\r\n", b"Length: 1\r\n 1\r\n"),
        post(b"a").replace(b"\r\n", b"\n"),
        CHUNKED.replace(b"chunked", b"chunked\t"),
        CHUNKED.replace(b"chunked", b"chunked, chunked"),
        CHUNKED.replace(b"chunked", b"chunked\r\nTransfer-Encoding: chunked"),
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(b"a").replace(b"Host: h\r\n", b""),
        post(b"a", "User-Agent: a", "User-Agent: b"),
        post(b"a", path="x"),
        post(b"a", path="/\xe9"),
        post(b"a", path="", method="GET "),
        post(b"a", method="BREW"),
        post(b"a", path="/a#b"),
        post(b"a", path="http://h#/v1/x"),
        post(b"a", path="/" + "a" * (MAX_LINE_BYTES - len("POST / HTTP/1.1\r\n") + 1)),  # whether it comes in pieces or not
        post(b"a", path="/a/../b"),
        post(b"a", path="/%2e%2E/b"),
        post(b"a", path="ftp://h/a"),
        post(b"a", path="a:1", method="CONNECT"),
        post(b"a", path="/ b"),
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_what_is_refused(data: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        read_head(data)
    assert (refused.value.status == 417) == (b"Expect" in data)


@pytest.mark.parametrize(
    ("data", "method", "target", "path"),
    [
        (post(b"a", version="1.0"), "POST", CHAT, CHAT),
        (post(b"a", "X:", "x:  1", "Y: 1 ", "Z: \t1", "E: \xe9"), "POST", CHAT, CHAT),
        (post(b"a", version="1.0").replace(b"Host: h\r\n", b""), "POST", CHAT, CHAT),
        (post(b"a", path="http://h/v1/x?y"), "POST", "/v1/x?y", "/v1/x"),
        (post(b"a", path="HTTPS://h"), "POST", "/", "/"),
        (post(b"a", path="/%41?%42"), "POST", "/%41?%42", "/A"),
        (post(b"a", path="/a..b/...?../"), "POST", "/a..b/...?../", "/a..b/..."),
        (post(b"a", path="*", method="OPTIONS"), "OPTIONS", "*", "*"),
    ],
)
def test_unusual_heads(data: bytes, method: str, target: str, path: str) -> None:
    for length in (b"Content-Length", b"CONTENT-LENGTH"):
        begun = read_head(data.replace(b"Content-Length", length))
        assert begun
        assert (begun.head.method, begun.head.target, begun.head.path, begun.length) == (method, target, path, 1)


@pytest.mark.parametrize("data", [b"", b"P", b"POST", b"POST /", post(b"")[:-1], post(b"")[:-4]])
def test_what_is_not_whole(data: bytes) -> None:
    assert read_head(data) is None


def test_headers_that_come_twice() -> None:
    begun = read_head(post(b"a", "X: 1", "x: 2", "Y: 3"))
    assert begun
    fields = begun.head.fields
    assert (fields.get("X"), fields.joined("x"), fields.joined("Y"), fields.joined("Z")) == ("1", "1,2", "3", "")
    assert (fields.repeats("X"), fields.repeats("Y"), fields.distinct, "y" in fields, "z" in fields) == (
        True,
        False,
        False,
        True,
        False,
    )


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

    async def handler(request: HttpRequest) -> Any:
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
    async def slow(request: HttpRequest) -> Any:
        await asyncio.sleep(0.3)
        return await echo(request)

    async with serving(slow, idle_s=0.1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"a"))
        async with asyncio.timeout(40):
            assert (await reader.read()).endswith(b"POST /v1/chat/completions a")
        writer.close()


async def test_the_last_answer_closes_the_connection() -> None:
    async def last(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=0)
        return reply

    async with serving(last) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"a") + post(b"b"))
        async with asyncio.timeout(40):
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
        writer.close()


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_the_last_answer_arrives_whatever_comes_behind_its_request(loop: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """A connection that is closed before all of it was read is reset, and its client loses what it has not read."""

    async def last(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=5, first=b"hello")
        return reply

    async def scenario() -> None:
        async with serving(last) as (front, port), asyncio.timeout(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET * 40_000)
            await writer.drain()
            assert (await reader.read()).endswith(b"\r\n\r\nhello")
            writer.close()
            await eventually(lambda: not front.connections and not front.budget.held)

    loop(scenario())


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_a_closed_connection_whose_client_does_not_read_ends(keep_alive: bool) -> None:
    """Too little is left of the answer to wait for the client before the connection is closed."""
    unsent = 0

    async def handler(request: HttpRequest) -> Any:
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

    async def handler(request: HttpRequest) -> Any:
        nonlocal unsent
        transport = request.connection.transport
        assert transport
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=None)
        while not (unsent := transport.get_write_buffer_size()):
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


async def test_what_comes_behind_a_request_is_bounded() -> None:
    """The connection is not read while much waits behind a request, and what waits is served after it."""
    go = asyncio.Event()

    async def handler(request: HttpRequest) -> Any:
        await go.wait()
        return await echo(request)

    many = 40
    async with serving(handler) as (front, port):
        body = b"x" * MAX_PIPELINED
        asking = asyncio.create_task(ask(port, [post(body) * many], many))
        await eventually(lambda: front.connections and front.connections[0]._held)
        go.set()
        assert await asking == [b"POST /v1/chat/completions " + body] * many


async def test_small_requests_without_end_are_read_as_they_are_served() -> None:
    """Each one that is served makes room for no more than itself, and one timer looks at the socket."""
    reads, watches, done = 0, 0, asyncio.Event()

    async def handler(request: HttpRequest) -> Any:
        nonlocal reads, watches
        transport = request.connection.transport
        reads += transport.is_reading() and request.lease.account.held > MAX_PIPELINED + 1000
        if request.path == "/last":
            watches = sum("_watch" in repr(each) for each in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
            done.set()
        return await echo(request)

    async with serving(handler) as (_, port), asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(reader.read())
        writer.write(GET * 12_000 + GET.replace(b"health", b"last"))
        await done.wait()
        writer.close()
        reading.cancel()
    assert not reads
    assert watches <= 1


async def test_what_comes_behind_a_chunked_request_is_held_once() -> None:
    """Not by the request as well, uncharged."""
    begun, go, many, size = 0, asyncio.Event(), 16, 100_000

    async def handler(request: HttpRequest) -> Any:
        nonlocal begun
        begun += 1
        await go.wait()
        return await echo(request)

    async with serving(handler, connections=2 * many) as (front, port), contextlib.AsyncExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(many):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(CHUNKED + post(b"x" * size))
            await writer.drain()
        await eventually(lambda: begun == many and front.budget.held > many * MAX_PIPELINED)
        assert tracemalloc.get_traced_memory()[0] < 1.5 * front.budget.held
        go.set()


async def test_trailers_are_bounded_for_they_are_not_charged() -> None:
    read = list[int]()

    async def handler(request: HttpRequest) -> Any:
        with contextlib.suppress(GatewayError):
            await request.arrived()
            read.append(size)
        reply = request.reply(keep_alive=False, patience_s=5)
        reply.begin(200, b"", length=0)
        return reply

    async with serving(handler) as (_, port), asyncio.timeout(40):
        for size in (MAX_TRAILER_BYTES - 100, MAX_TRAILER_BYTES):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(CHUNKED[:-2] + b"X: %b\r\n\r\n" % (b"x" * size))
            assert await reader.read()
            writer.close()
    assert read == [MAX_TRAILER_BYTES - 100]


async def test_what_waits_in_the_write_buffer_of_a_connection_is_bounded() -> None:
    async with serving(echo) as (front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = front.connections
        assert connection.transport
        assert connection.transport.get_write_buffer_limits()[1] == MAX_UNCHARGED  # type: ignore[attr-defined]
        writer.close()


async def test_an_idle_connection_does_not_keep_its_last_answer() -> None:
    body = bytes(range(256)) * 4096
    before = sys.getrefcount(body)

    async def answer(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=True, patience_s=5)
        reply.begin(200, b"", length=len(body), first=body)
        return reply

    async with serving(answer) as (_, port):
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for reader, writer in ends:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(body)) == body
        await eventually(lambda: sys.getrefcount(body) == before)
        for _, writer in ends:
            writer.close()


async def test_a_client_that_expects_a_100_gets_it_once_and_only_if_its_body_is_missing() -> None:
    data = post(b"abcdef", "Expect: 100-continue")
    async with serving(echo) as (_, port), asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await reader.readuntil(b"abcdef")
        writer.write(data[:-6])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for piece in (b"abc", b"def"):
            writer.write(piece)
            await asyncio.sleep(0.01)  # so that it comes by itself
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"get / HTTP/1.1", b"GET / HTTP/1.1\n", b"GET /" + b"x" * 9000])
async def test_what_is_no_http_is_answered_before_a_head_is_complete(data: bytes) -> None:
    """A connection of TLS, for one."""
    async with serving(echo) as (front, port), asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        line = await reader.readline()
        assert line.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
        assert b"\r\nConnection: close\r\n" in await reader.read()
        writer.close()
        await eventually(lambda: not front.connections)


async def test_a_head_that_takes_too_long_ends_the_connection() -> None:
    """However many of its bytes come meanwhile."""
    async with serving(echo, idle_s=0.2) as (front, port), asyncio.timeout(40):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET[:-3])
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b"X" if front.connections else b"")
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):  # if its last byte has met the end
            assert reading.result() == b""
        writer.close()
