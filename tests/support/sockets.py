"""Options of sockets, and ports that refuse connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


def silence_of(sock: socket.socket) -> tuple[bool, float]:
    """(True if a peer without anything to confirm is probed within that time, seconds after which a silent peer is gone)."""
    limit_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
    probed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    return probed and 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < limit_s, limit_s


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
