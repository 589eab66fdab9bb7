"""TCP connections whose peer is gone without an end: its machine lost power, or a NAT or firewall forgot the connection."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

_PROBES: Final = 4  # of a silent connection, within the time


def end_with_peer(sock: socket.socket, after_s: int) -> None:
    """Let the system end the connection once its peer has confirmed nothing for after_s: neither sent bytes, nor a keep-alive
    probe. Accepted sockets inherit it from their listener.

    A peer that confirms probes and takes no bytes for after_s (its window is full) ends it, too. Systems without
    TCP_USER_TIMEOUT notice only the loss of a peer to which nothing is being sent.
    """
    every_s = after_s // _PROBES
    with contextlib.suppress(OSError):  # the connection has ended already, or the system knows less than its headers
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", every_s),
            ("TCP_KEEPINTVL", every_s),
            ("TCP_KEEPCNT", _PROBES - 1),
            ("TCP_USER_TIMEOUT", after_s * 1000),
        ):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
