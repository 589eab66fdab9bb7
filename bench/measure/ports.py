"""Ports on loopback for programs that are started and restarted."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

PORTS: Final = range(20_000, 32_000)  # below those that the kernel gives to connections and to who asks for any


def free_port() -> int:
    """A port that stays free while its program is not there, with others running beside it."""
    chance = random.SystemRandom()
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port := chance.choice(PORTS)))
            return port


def free_ports(count: int) -> list[int]:
    """Different ones."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
