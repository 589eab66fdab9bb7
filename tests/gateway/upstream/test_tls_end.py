"""Over TLS the end of a connection comes with its last bytes, or while it is held back: nothing that came before it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.upstream.connection import Connection
from tests.gateway.conftest import eventually
from tests.gateway.upstream.test_connection import LIMITS
from tests.gateway.upstream.test_dialer import certificate

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
__all__ = ["certificate"]

LINES, TEXT, LARGE = b"a\n" * 400_000, b"x" * 900_000, b"y" * 6_500_000


def contexts(path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The replica's, and ours."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(path, path.with_name("key"))
    return theirs, ssl.create_default_context(cafile=str(path))


async def answer(body: bytes, head: bytes, path: Path, *, held_s: float = 0.0) -> bytes:
    """What of an answer goes into the sink that is sent at once, with the connection's end behind it. held_s: the seconds for
    which it is held back at its beginning.
    """
    theirs, ours = contexts(path)

    def serve() -> None:
        plain, _ = listener.accept()
        with plain, theirs.wrap_socket(plain, server_side=True) as sock:
            sock.recv(3)
            with contextlib.suppress(OSError):  # the client has had enough
                sock.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body)
                socket.socket.shutdown(sock, socket.SHUT_WR)  # without a word of TLS
                while socket.socket.recv(sock, 65536):
                    """Until the client has read all."""

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    served = asyncio.create_task(asyncio.to_thread(serve))
    port = listener.getsockname()[1]
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    _, connection = await loop.create_connection(lambda: Connection(loop), "127.0.0.1", port)
    try:
        await connection.secure(ours, "replica.test")
        connection.send(b"GET", to_head=False, limits=LIMITS)
        await connection.wait()
        if held_s:
            connection.pause()
            loop.call_later(held_s, connection.resume)
        await connection.pump(parts.append)
        assert connection.complete
    finally:
        connection.abort()
        await served
        listener.close()
    return b"".join(parts)


@on_both_loops
@pytest.mark.parametrize("body", [LINES, TEXT, LARGE], ids=["lines", "text", "large"])
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("held_s", [0.0, 0.3])
def test_the_whole_answer_is_read(body: bytes, framed: bool, held_s: float, certificate: Path, run: Run) -> None:
    head = b"Content-Length: %d\r\n" % len(body) if framed else b""

    async def scenario() -> None:
        for _ in range(2):
            assert await answer(body, head, certificate, held_s=held_s) == body

    run(scenario())


@on_both_loops
def test_what_is_held_back_stays_in_the_kernel(certificate: Path, run: Run) -> None:
    """However much the replica sends; and all of it is there when it goes on."""
    theirs, ours = contexts(certificate)
    answers, sent, takes = b"HTTP/1.1 200 OK\r\n\r\n", 0, select.poll()

    async def scenario() -> None:
        nonlocal sent
        drains = False

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent, drains
            await reader.read(3)
            takes.register(writer.get_extra_info("socket"), select.POLLOUT)
            writer.write(answers)
            while sent < FLOOD:
                writer.write(PIECE)
                sent += len(PIECE)
                drains = True
                await writer.drain()
                drains = False
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)
        loop, got = asyncio.get_running_loop(), list[int]()
        _, connection = await loop.create_connection(lambda: Connection(loop), *server.sockets[0].getsockname())
        await connection.secure(ours, "replica.test")
        connection.send(b"GET", to_head=False, limits=LIMITS)
        await connection.wait()
        connection.pause()
        pumped = asyncio.create_task(connection.pump(lambda data: got.append(len(data))))

        def is_stuck() -> bool:
            """Nothing will change by itself: the replica waits for its kernel, that for ours, and nobody reads from that."""
            assert connection._tcp
            return drains and not takes.poll(0) and not connection._tcp.is_reading()

        await eventually(lambda: is_stuck() or sent >= FLOOD)
        assert sent < FLOOD
        assert sum(got) + connection.unread + connection._late.held < 1 << 20
        connection.resume()
        async with asyncio.timeout(40):
            await pumped
        assert sum(got) == FLOOD
        connection.abort()
        server.close()
        await server.wait_closed()

    run(scenario())


PIECE, FLOOD = b"z" * 65_536, 65_536 * 800


@on_both_loops
def test_a_replica_that_speaks_with_its_handshake_is_not_used(certificate: Path, run: Run) -> None:
    theirs, ours = contexts(certificate)

    async def scenario() -> None:
        spoke = False

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal spoke
            spoke = True  # the handshake is over
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=theirs)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), *server.sockets[0].getsockname())
        with contextlib.suppress(ConnectionResetError):  # it may be noticed at once
            await connection.secure(ours, "replica.test")
        await eventually(lambda: spoke and not connection.alive)
        server.close()
        await server.wait_closed()

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_handshake_that_fails_or_is_given_up_closes_the_connection(cancelled: bool, certificate: Path, run: Run) -> None:
    _, ours = contexts(certificate)

    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            begun.set()
            if not cancelled:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with contextlib.suppress(OSError):
                while await reader.read(1000):
                    """Until we close it."""
            writer.transport.abort()
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), *server.sockets[0].getsockname())
        securing = asyncio.create_task(connection.secure(ours, "replica.test"))
        await begun.wait()
        if cancelled:
            securing.cancel()
        with pytest.raises((ssl.SSLError, asyncio.CancelledError)):
            await securing
        async with asyncio.timeout(20):
            await ended.wait()
        server.close()
        await server.wait_closed()

    run(scenario())


@on_both_loops
def test_a_connection_that_ends_before_its_handshake_is_refused_without_noise(certificate: Path, run: Run) -> None:
    _, ours = contexts(certificate)

    async def scenario() -> None:
        over = 0

        async def hangs_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal over
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            over += 1

        loop, noise = asyncio.get_running_loop(), list[object]()
        loop.set_exception_handler(lambda _loop, context: noise.append(context))
        async with await asyncio.start_server(hangs_up, "127.0.0.1", 0) as server:
            for turns in range(6):
                _, connection = await loop.create_connection(lambda: Connection(loop), *server.sockets[0].getsockname())
                for _ in range(turns):
                    await asyncio.sleep(0)
                with pytest.raises(ConnectionError):
                    await connection.secure(ours, "replica.test")
                assert not connection.alive
                await eventually(lambda connection=connection, ended=turns + 1: over == ended and connection._tcp is None)
        gc.collect()  # a task or a future whose error nobody has read is reported when it is collected
        for _ in range(3):
            await asyncio.sleep(0)
        assert not noise

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("reads", [True, False])
def test_a_request_is_sent_when_its_ciphertext_is(certificate: Path, run: Run, *, reads: bool) -> None:
    """TLS has encrypted it at once, and most of it waits in the TCP transport, for the replica answers before it reads."""
    theirs, ours = contexts(certificate)

    async def scenario() -> None:
        go_on, sent = threading.Event(), list[int]()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        listener.settimeout(60)

        def serve() -> None:
            plain, _ = listener.accept()
            with plain, theirs.wrap_socket(plain, server_side=True) as sock:
                sock.recv(3)
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                go_on.wait()
                with contextlib.suppress(OSError):
                    while sock.recv(1 << 16):
                        """Until the client closes."""

        served = asyncio.create_task(asyncio.to_thread(serve))
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(loop), *listener.getsockname())
        tcp = connection._tcp
        assert tcp
        tcp.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        try:
            await connection.secure(ours, "replica.test")
            connection.send(b"POST", TEXT, to_head=False, limits=LIMITS)
            await connection.wait()
            tls = connection._transport
            assert tls
            assert (tls.get_write_buffer_size(), tcp.get_write_buffer_size() > 0) == (0, True)
            connection.when_sent(lambda: sent.append(tcp.get_write_buffer_size()))
            assert not sent
            if reads:
                go_on.set()
                await eventually(lambda: sent)
                assert sent == [0]
            connection.take()
            assert connection.release() is reads
        finally:
            connection.abort()
            go_on.set()
            await served
            listener.close()

    run(scenario())
