"""The idle connections to one replica, and what they show about it; new ones come from whatever can `connect`.

An idle connection that the replica closes may be the only sign of a quick restart: `hung_up` is called with the seconds for
which it was idle. Bytes of answers to requests are signs of life: `answered_at`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final, Protocol

from gateway.upstream.connection import Connection

# vLLM and other uvicorn servers close idle connections after 5 s; a pooled one must be gone before that.
KEEPALIVE_S: Final = 4.0


class Dials(Protocol):
    """Makes connections to one replica: a `Dialer`, or a test's own."""

    async def connect(self, timeout_s: float) -> Connection:
        """Raises ReplicaFailure, or GatewayError where the gateway itself is out of resources."""


class ConnectionPool:
    """The connections to one address. `idle` gives one, `connect` makes one; `give_back` keeps it if it is still good.

    hung_up: called with the seconds for which a connection was idle when the replica closed it.
    """

    def __init__(self, dialer: Dials, hung_up: Callable[[float], None] | None = None) -> None:
        self._dialer = dialer
        self._hung_up = hung_up
        self._idle: list[Connection] = []  # the one used last is the last
        self._busy: set[Connection] = set()  # those that carry a request
        self._answered_at = -math.inf
        self._sweeper: asyncio.TimerHandle | None = None

    def idle(self) -> Connection | None:
        """The idle connection that was used last, if one is fresh enough."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and now - connection.idle_since < KEEPALIVE_S:
                if connection.quiet:
                    connection.lost = None
                    return connection
                self._lost(connection)
            _drop(connection)
        return None

    def carries_request(self, connection: Connection) -> None:
        """From now on until it is given back the answer's bytes are signs of life. O(1)."""
        self._busy.add(connection)

    @property
    def answered_at(self) -> float:
        """When the last byte of an answer to a request came, by the loop's clock; -inf: never. O(requests under way)."""
        latest = max((connection.answered_at for connection in self._busy), default=-math.inf)
        return max(self._answered_at, latest)

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection. Raises ReplicaFailure, or GatewayError where the gateway itself is out of resources."""
        return await self._dialer.connect(timeout_s)

    def give_back(self, connection: Connection) -> None:
        """Its call is over."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._answered_at = max(self._answered_at, connection.answered_at)
        if not connection.release():
            return
        connection.lost = self._lost
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep)

    def close(self) -> None:
        """Close what is idle."""
        if self._sweeper:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            _drop(self._idle.pop())

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_S
        for connection in self._idle:
            if connection.idle_since <= oldest:
                _drop(connection)
        self._idle = [connection for connection in self._idle if connection.alive]
        self._sweeper = loop.call_later(KEEPALIVE_S, self._sweep) if self._idle else None

    def _lost(self, connection: Connection) -> None:
        """The replica has closed an idle connection, or sends on it what nobody asked for."""
        connection.lost = None
        if self._hung_up:
            self._hung_up(asyncio.get_running_loop().time() - connection.idle_since)

    def __repr__(self) -> str:
        return f"<ConnectionPool of {self._dialer!r}, {len(self._idle)} idle>"


def _drop(connection: Connection) -> None:
    """Close an idle connection, which is no sign of anything."""
    connection.lost = None
    connection.abort()
