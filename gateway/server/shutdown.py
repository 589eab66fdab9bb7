"""Graceful shutdown of the listening sockets.

Every established connection must be answered, and the kernel establishes connections itself: a connection exists, and its
request may have arrived, before the loop accepts it; closing the listening socket resets these. So new connections are dropped
first (`cluster/syn_filter.py`), and then the established ones are accepted (`stop_accepting`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from collections.abc import Sequence

from gateway.cluster.syn_filter import drop_new
from gateway.request.running import ROUND_S, ROUNDS

HANDSHAKE_S, POLL_S = 1.2, 0.1  # for handshakes of slow clients; the kernel repeats a lost packet after a second
MAX_WAITING = 4096  # connections in the kernel's accept queue

# Linux's sock_diag(7), over netlink(7): struct nlmsghdr (length, type, flags, sequence, port), struct inet_diag_req_v2 (family,
# protocol, extensions, padding, states; source port, destination port; addresses; interface, cookie).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _SYN_RECV, _ANY_COOKIE = 4, 20, 0x301, 1 << 3, (1 << 64) - 1
_ANSWER_BYTES = 1 << 16


async def stop_accepting(
    listeners: Sequence[socket.socket], hurry: asyncio.Event, handshake_s: float = HANDSHAKE_S, *, shared: bool = False
) -> None:
    """Drop new connections and accept all established ones; the listening sockets can be closed then.

    hurry: do not wait for handshakes. handshake_s: limit of that wait, after the first rounds. shared: another process has the
    sockets too, and may go on with them: whether new connections are dropped is for that one to decide.
    """
    poll = select.poll()
    for listener in listeners:
        if not shared:
            drop_new(listener)
        poll.register(listener.fileno(), select.POLLIN)
    for _ in range(ROUNDS):  # for handshakes in progress
        await asyncio.sleep(ROUND_S)
    clock = asyncio.get_running_loop().time
    due = clock() + handshake_s
    while clock() < due and not hurry.is_set() and any(map(_has_handshakes, listeners)):  # noqa: ASYNC110  (there is no event)
        await asyncio.sleep(POLL_S)
    for _ in range(MAX_WAITING):
        if not poll.poll(0):
            break
        await asyncio.sleep(0)  # each iteration of the loop accepts some (`accept.py`)


def _has_handshakes(listener: socket.socket) -> bool:
    """Whether the kernel has half-open connections (SYN_RECV) to this port. False where that is unknown."""
    if sys.platform != "linux":
        return False
    wanted = struct.pack("=BBxxI", listener.family, socket.IPPROTO_TCP, _SYN_RECV)
    wanted += struct.pack("!HH32x", listener.getsockname()[1], 0) + struct.pack("=IQ", 0, _ANY_COOKIE)
    header = struct.pack("=IHHII", 16 + len(wanted), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.send(header + wanted)
            _, kind = struct.unpack_from("=IH", kernel.recv(_ANSWER_BYTES, socket.MSG_DONTWAIT))
    except (OSError, struct.error):
        return False
    return bool(kind == _SOCK_DIAG_BY_FAMILY)  # else the end of the list, or an error
