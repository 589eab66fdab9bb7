"""Listening sockets for connections.

A single process opens its own (`open_listeners`). Workers have one socket each, all on one port, over which the kernel spreads
connections (SO_REUSEPORT). The supervisor opens them, and they stay open when a worker ends: connections in their queues wait
for its successor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

from gateway.sockets import end_with_peer

# Connections that the kernel accepts on behalf of each socket. Beyond that it drops packets, and clients try again after 1, 3
# and 7 s. (Linux uses net.core.somaxconn instead if that is less.)
BACKLOG: Final = 1024
CLIENT_LOST_S: Final = 120  # a client that has confirmed nothing for this long is gone: its requests end, and replicas are free

# A classic BPF program (struct sock_filter, linux/filter.h) on a TCP header: load the byte of flags, drop it if SYN is set.
_DROP_SYN: Final = b"".join(
    struct.pack("=HBBI", *line) for line in ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
)
_SO_ATTACH_FILTER: Final = 26

Address = tuple[Any, ...]


def addresses_of(host: str, port: int) -> list[tuple[int, Address]]:
    """(family, address) of each address of the host, all with one free port. Raises OSError if there is none.

    port 0: any. Finds a process that listens there already; with SO_REUSEPORT alone the port would be shared with it unnoticed.
    """
    bound = _bind_all(host, port)
    found = [(int(sock.family), sock.getsockname()) for sock in bound]
    for sock in bound:
        sock.close()
    return found


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host, unshared with other processes. Raises OSError."""
    listeners = _bind_all(host, port)
    for sock in listeners:
        sock.listen(BACKLOG)
    return listeners


def _bind_all(host: str, port: int) -> list[socket.socket]:
    """A socket bound to each address of the host, all on one port; port 0: any."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        made: list[socket.socket] = []
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                made.append(stack.enter_context(_bound(family, (address[0], port, *address[2:]), shared=False)))
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT or len(found) == 1:  # a kernel without IPv6
                    raise
                continue
            port = made[-1].getsockname()[1]
        stack.pop_all()
    return made


def listen(addresses: Sequence[tuple[int, Address]], *, shared: bool = True) -> list[socket.socket]:
    """A listening socket for each of the addresses. shared: others may listen on the same addresses. Raises OSError."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(_bound(family, address, shared=shared)) for family, address in addresses]
        for sock in made:
            sock.listen(BACKLOG)
        stack.pop_all()
    return made


def refuse_new(listener: socket.socket) -> None:
    """Let the kernel begin no connection on this socket any more. Begun ones become established, and wait to be accepted.

    Without it, the connections that are established between the last `accept` and `close` are reset, though their clients may
    have sent requests. A client whose packet is dropped tries again a second later, when the port is closed. For all processes
    that share the socket, for ever. Linux only.
    """
    if sys.platform == "linux":
        program = ctypes.create_string_buffer(_DROP_SYN)
        lines = len(_DROP_SYN) // struct.calcsize("=HBBI")
        with contextlib.suppress(OSError):  # a sandbox without socket filters
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", lines, ctypes.addressof(program)))


def _bound(family: int, address: Address, *, shared: bool) -> socket.socket:
    # asyncio sets TCP_NODELAY only if the protocol is named; accepted sockets inherit it.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        end_with_peer(sock, CLIENT_LOST_S)
        sock.setblocking(False)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(address: Address, *, secure: bool = False) -> str:
    """secure: with TLS."""
    host, port = address[:2]
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
