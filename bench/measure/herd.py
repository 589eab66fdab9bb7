"""Many clients that connect and send at once, before the server has accepted any of them: as after a restart of the gateway, or
at the start of a job with many workers.

An event loop that connects one client after the other gives the server time to accept each before the next one sends. So plain
sockets are used, and handed to the event loop afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

Dialled = tuple[socket.socket, bytes]
"""A connection, and what is still to be sent of its first request."""


def dial(port: int, requests: Iterator[bytes], count: int) -> list[Dialled]:
    """Connections to a port of this machine, with as much of a request sent on each as the kernel takes. Raises OSError."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_connecting(port)) for _ in range(count)]
        dialled = [(sock, _send(sock, request)) for sock, request in zip(sockets, requests, strict=False)]
        stack.pop_all()
    return dialled


def _connecting(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    if (error := sock.connect_ex(("127.0.0.1", port))) not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(error, "cannot connect")
    return sock


def _send(sock: socket.socket, request: bytes) -> bytes:
    """Returns what the kernel does not take now: all of it, if its queue for the server is full."""
    try:
        return request[sock.send(request) :]
    except BlockingIOError:
        return request
