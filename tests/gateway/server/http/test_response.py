"""Answers: their framing, what a slow client makes of them, and how they break off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvloop

from gateway.server.http.request import HttpRequest
from gateway.server.http.response import Dates, HttpReply
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.http1 import AnswerParser
from tests.gateway.servers import serving
from tests.support.compiled import uncompiled

Handler = Callable[[HttpRequest], Awaitable[Any]]


async def ask(port: int, data: bytes) -> bytes:
    """Everything that comes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(40):
        received = await reader.read()
    writer.close()
    return received


def bare(data: bytes) -> list[bytes]:
    """An answer's lines without those that differ each time."""
    return [line for line in data.split(b"\r\n") if not line.startswith(b"Date: ")]


def replies(length: int | None, *parts: bytes, status: int = 200, first: bytes = b"", keep: bool = True) -> Handler:
    async def handler(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=keep, patience_s=5)
        reply.begin(status, b"x-a: 1\r\n", length=length, first=first)
        for part in parts:
            reply.write(part)
        reply.end()
        return reply

    return handler


CLOSE = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
HEAD = [b"HTTP/1.1 200 OK", b"x-a: 1"]
END = [b"Connection: close", b"Server: warmroute", b""]


@pytest.mark.parametrize(
    ("handler", "request_bytes", "expected"),
    [
        (replies(5, b"llo", first=b"he"), CLOSE, [*HEAD, b"Content-Length: 5", *END, b"hello"]),
        (replies(0), CLOSE, [*HEAD, b"Content-Length: 0", *END, b""]),
        (
            replies(None, b"lo", b"", first=b"hel"),
            CLOSE,
            [*HEAD, b"Transfer-Encoding: chunked", *END, b"3", b"hel", b"2", b"lo", b"0", b"", b""],
        ),
        (replies(None, first=b""), CLOSE, [*HEAD, b"Transfer-Encoding: chunked", *END, b"0", b"", b""]),
        (replies(None, b"hello"), b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", [*HEAD, *END, b"hello"]),
        (replies(5, b"hello"), b"GET / HTTP/1.0\r\n\r\n", [*HEAD, b"Content-Length: 5", *END, b"hello"]),
        (replies(5, first=b""), CLOSE.replace(b"GET", b"HEAD"), [*HEAD, b"Content-Length: 5", *END, b""]),
        (replies(None, first=b"x"), CLOSE.replace(b"GET", b"HEAD"), [*HEAD, b"Transfer-Encoding: chunked", *END, b""]),
        (replies(0, status=204), CLOSE, [b"HTTP/1.1 204 No Content", b"x-a: 1", *END, b""]),
        (replies(None, status=304, first=b""), CLOSE, [b"HTTP/1.1 304 Not Modified", b"x-a: 1", *END, b""]),
        (replies(2, b"ok", status=299), CLOSE, [b"HTTP/1.1 299 ", b"x-a: 1", b"Content-Length: 2", *END, b"ok"]),
        (replies(2, b"ok", keep=False), CLOSE.replace(b"close", b"x"), [*HEAD, b"Content-Length: 2", *END, b"ok"]),
    ],
)
async def test_every_framing(handler: Handler, request_bytes: bytes, expected: list[bytes]) -> None:
    async with serving(handler) as (_, port):
        assert bare(await ask(port, request_bytes)) == expected


@pytest.mark.parametrize("length", [None, 9])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_answer_that_breaks_off_does_not_look_whole(length: int | None, version: bytes) -> None:
    async def handler(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=True, patience_s=5)
        reply.begin(200, b"", length=length, first=b"hello")
        await asyncio.sleep(0)
        reply.cut()
        return reply

    async with serving(handler) as (_, port):
        if version == b"1.0" and length is None:
            with pytest.raises(ConnectionResetError):
                await ask(port, b"GET / HTTP/1.0\r\n\r\n")
        else:
            got = await ask(port, b"GET / HTTP/%b\r\nHost: h\r\n\r\n" % version)
            assert got.endswith(b"hello" if length else b"5\r\nhello\r\n")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_is_broken_off_though_its_client_has_just_left(run: Callable[[Any], None]) -> None:
    """The connection is closed already, and nothing can be set on it."""
    cut = asyncio.Event()

    async def handler(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=True, patience_s=5)
        reply.begin(200, b"", length=None, first=b"hello")
        assert request.connection.transport
        request.connection.transport.abort()

        def later() -> None:
            reply.cut()
            cut.set()

        asyncio.get_running_loop().call_later(0.05, later)
        return reply

    async def scenario() -> None:
        async with serving(handler) as (_, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            async with asyncio.timeout(20):
                await cut.wait()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    run(scenario())


async def test_a_connection_carries_many_answers() -> None:
    async with serving(replies(None, b"a")) as (_, port):
        data = await ask(port, CLOSE.replace(b"close", b"x") * 2 + CLOSE)
    found = []
    while data:
        answer = AnswerParser()
        body, data = answer.feed(data), answer.rest
        found.append((answer.complete, body))
    assert found == [(True, b"a")] * 3


async def test_an_old_client_may_ask_to_keep_its_connection() -> None:
    async with serving(replies(1, b"a")) as (_, port):
        data = await ask(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + b"GET / HTTP/1.0\r\n\r\n")
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert data.count(b"Connection: keep-alive") == data.count(b"Connection: close") == 1


class Source:
    """Stands for a replica's answer."""

    def __init__(self) -> None:
        self.paused, self.resumed = asyncio.Event(), asyncio.Event()

    def pause(self) -> None:
        self.paused.set()

    def resume(self) -> None:
        self.resumed.set()


MUCH = b"x" * (16 << 20)


@uncompiled
async def test_the_source_is_held_back_while_the_client_does_not_read() -> None:
    source, written = Source(), asyncio.Event()

    async def handler(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=False, patience_s=60)
        reply.feed_from(cast(ReplicaAnswer, source))
        reply.begin(200, b"", length=len(MUCH), first=MUCH)
        reply.end()
        written.set()
        return reply

    async with serving(handler) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(CLOSE)
        async with asyncio.timeout(40):
            await written.wait()
            assert source.paused.is_set()
            assert not source.resumed.is_set()
            assert (await reader.read()).endswith(MUCH)
            await source.resumed.wait()
        writer.close()


@uncompiled
async def test_a_client_that_never_reads_is_cut_off() -> None:
    cut = asyncio.Event()

    class Cut(HttpReply):
        def cut(self) -> None:
            super().cut()
            cut.set()

    async def handler(request: HttpRequest) -> Any:
        reply = Cut(request.connection, http11=True, to_head=False, keep_alive=True, patience_s=0.05)
        reply.begin(200, b"", length=len(MUCH), first=MUCH)
        assert repr(reply) == "<HttpReply begun, plain>"
        return reply

    async with serving(handler) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(CLOSE)
        async with asyncio.timeout(40):
            await cut.wait()
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(len(MUCH))
        writer.close()


async def test_a_client_that_left_is_noticed_at_the_next_write() -> None:
    raised = asyncio.get_running_loop().create_future()

    async def handler(request: HttpRequest) -> Any:
        reply = request.reply(keep_alive=True, patience_s=1)
        reply.begin(200, b"", length=5)
        reply.cut()
        assert reply.keep_alive is False
        try:
            reply.write(b"hello")
        except ConnectionResetError as error:
            raised.set_result(str(error))
            raise
        return reply

    async with serving(handler) as (_, port):
        with contextlib.suppress(ConnectionError):
            await ask(port, CLOSE)
    assert await raised == "the client left"


def test_the_date_is_made_once_a_second() -> None:
    dates = Dates()
    line = dates.line(1e9 + 0.1)
    assert line == b"Date: Sun, 09 Sep 2001 01:46:40 GMT\r\n"
    assert dates.line(1e9 + 0.9) is line
    assert dates.line(1e9 + 1) != line
