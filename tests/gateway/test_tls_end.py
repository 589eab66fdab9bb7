"""Over TLS the end of a connection comes with its last bytes, or while it is held back: nothing that came before it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.errors import ReplicaFailure
from gateway.upstream import MAX_LATE, Connection
from tests.gateway.test_dialer import certificate
from tests.gateway.test_upstream import LIMITS

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
__all__ = ["certificate"]

LINES, TEXT = b"a\n" * 400_000, b"x" * 900_000


async def answer(body: bytes, head: bytes, path: Path, *, held_s: float = 0.0) -> bytes:
    """What of an answer goes into the sink that is sent at once, with the connection's end behind it. held_s: for so long it is
    held back at its beginning.
    """
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(path, path.with_name("key"))
    ours = ssl.create_default_context(cafile=str(path))

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
    served = asyncio.create_task(asyncio.to_thread(serve))
    port = listener.getsockname()[1]
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    _, connection = await loop.create_connection(
        lambda: Connection(loop), "127.0.0.1", port, ssl=ours, server_hostname="replica.test"
    )
    try:
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
@pytest.mark.parametrize("body", [LINES, TEXT], ids=["lines", "text"])
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("held_s", [0.0, 0.3])
def test_the_whole_answer_is_read(body: bytes, framed: bool, held_s: float, certificate: Path, run: Run) -> None:
    head = b"Content-Length: %d\r\n" % len(body) if framed else b""

    async def scenario() -> None:
        for _ in range(2):
            assert await answer(body, head, certificate, held_s=held_s) == body

    run(scenario())


@on_both_loops
def test_an_answer_that_may_have_lost_its_end_is_broken_off(certificate: Path, run: Run) -> None:
    """It is framed by the connection's end, and was held back for so long that uvloop's TLS has dropped some of it."""
    body = b"x" * (MAX_LATE + 350_000)

    async def scenario() -> None:
        with contextlib.suppress(ReplicaFailure):
            assert await answer(body, b"", certificate, held_s=0.5) == body

    run(scenario())
