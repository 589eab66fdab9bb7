"""Going down with grace: which clients still get in.

Nobody who was let in may go without an answer, and the kernel lets in on its own: a connection is made, and its request may be
here, before the loop has accepted it; closing the listening socket resets all of these. So first no new one may begin
(`syn_filter.py`), and those that have begun are accepted (`last_in`).

aiohttp would wait twice as long as it is told to, and end what is left without a word; so this is ours.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import sys
from collections.abc import Sequence

from gateway.request.running import ROUND_S, ROUNDS
from gateway.server.syn_filter import drop_new

HANDSHAKE_S, LOOK_S = 1.2, 0.1  # then, for who is far away or has no CPU; the kernel repeats a lost packet after a second
MAX_WAITING = 4096  # connections that the kernel holds for us

# Linux's sock_diag(7), over netlink(7): struct nlmsghdr (length, type, flags, sequence, port), struct inet_diag_req_v2 (family,
# protocol, extensions, padding, states; source port, destination port; addresses; interface, cookie).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, _SYN_RECV, _ANY_COOKIE = 4, 20, 0x301, 1 << 3, (1 << 64) - 1
_ANSWER_BYTES = 1 << 16


async def last_in(listeners: Sequence[socket.socket], hurry: asyncio.Event, handshake_s: float = HANDSHAKE_S) -> None:
    """Let nobody new in, and accept all who are: then the listening sockets can be closed.

    hurry: who is not quite in is not waited for. handshake_s: nor longer than this, after the first rounds.
    """
    poll = select.poll()
    for listener in listeners:
        drop_new(listener)
        poll.register(listener.fileno(), select.POLLIN)
    for _ in range(ROUNDS):  # connections that are being made
        await asyncio.sleep(ROUND_S)
    clock = asyncio.get_running_loop().time
    due = clock() + handshake_s
    while clock() < due and not hurry.is_set() and any(map(_has_handshakes, listeners)):  # noqa: ASYNC110  (it has no event)
        await asyncio.sleep(LOOK_S)
    for _ in range(MAX_WAITING):
        if not poll.poll(0):
            break
        await asyncio.sleep(0)  # some are accepted in each iteration of the loop (`accept.py`)


def _has_handshakes(listener: socket.socket) -> bool:
    """Whether the kernel has half a connection to its port: the client's last packet of three has not come. (Unknown: no.)"""
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
    return bool(kind == _SOCK_DIAG_BY_FAMILY)  # else it is the end of the list, or an error
