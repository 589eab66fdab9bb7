"""The sockets that workers accept on: one for each, on one port; the kernel spreads the connections (SO_REUSEPORT).

They are made by the supervisor, and stay when a worker ends: who waits to be accepted waits for the worker's successor.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

BACKLOG = 1024


Address = tuple[Any, ...]


def addresses_of(host: str, port: int) -> list[tuple[int, Address]]:
    """(family, address) of each address of the host, all with one port that is free. Raises OSError if there is none.

    port 0: any. Whoever listens there already is found here: with SO_REUSEPORT we would share the port without knowing.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    free = []
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
        with _bound(family, (address[0], port, *address[2:]), shared=False) as sock:
            free.append((int(family), sock.getsockname()))
            port = free[-1][1][1]
    return free


def listen(addresses: Sequence[tuple[int, Address]], *, shared: bool = True) -> list[socket.socket]:
    """One worker's sockets. shared: others may listen on the same addresses. Raises OSError."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(_bound(family, address, shared=shared)) for family, address in addresses]
        for sock in made:
            sock.listen(BACKLOG)
        stack.pop_all()
    return made


def _bound(family: int, address: Address, *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(address: Address) -> str:
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
