"""Listening sockets for connections.

A single process opens its own (`open_listeners`). Workers have one socket each, all on one port, over which the kernel spreads
connections (SO_REUSEPORT). The supervisor opens them, and they stay open when a worker ends: connections in their queues wait
for its successor.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence
from typing import Any, Final

from gateway.sockets import end_with_peer

# Connections that the kernel accepts on behalf of each socket. Beyond that it drops packets, and clients try again after 1, 3
# and 7 s. (Linux uses net.core.somaxconn instead if that is less.)
BACKLOG: Final = 1024
CLIENT_LOST_S: Final = 120  # a client that has confirmed nothing for this long is gone: its requests end, and replicas are free

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
