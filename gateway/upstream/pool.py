"""Pool of idle connections to one replica; new ones come from a `Connector`.

The pool reports two signs of the replica's state: an idle connection that the replica closes may be the only sign of a quick
restart (`on_idle_closed` gets its idle seconds), and bytes of answers to requests are signs of life (`answered_at`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final, Protocol

from gateway.upstream.connection import Connection

# vLLM and other uvicorn servers close idle connections after 5 s; a pooled one must be gone before that.
KEEPALIVE_S: Final = 4.0


class Connector(Protocol):
    """Makes connections to one replica: a `Dialer`, or a fake in tests."""

    async def connect(self, timeout_s: float) -> Connection:
        """Raises ReplicaFailure, or GatewayError if the gateway itself is out of resources."""


class ConnectionPool:
    """Connections to one address: `idle` takes one, `connect` makes one, `give_back` keeps a reusable one.

    on_idle_closed: called with its idle seconds when the replica closes an idle connection. running: the call of a request that
    each of its connections carries (`client.ReplicaCall`).
    """

    def __init__(self, connector: Connector, on_idle_closed: Callable[[float], None] | None = None) -> None:
        self._connector = connector
        self._on_idle_closed = on_idle_closed
        self._idle: list[Connection] = []  # most recently used last
        self.running: dict[Connection, Any] = {}  # the calls of requests
        self._answered_at = -math.inf
        self._generation = 0
        self._sweeper: asyncio.TimerHandle | None = None

    def idle(self) -> Connection | None:
        """The most recently used idle connection, if one is younger than KEEPALIVE_S."""
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

    def carries_request(self, connection: Connection, call: object) -> None:
        """Count the answer's bytes as signs of life until the connection is given back. O(1)."""
        self.running[connection] = call

    def carries(self, connection: Connection) -> bool:
        """True if it carries a request (not a probe)."""
        return connection in self.running

    @property
    def answered_at(self) -> float:
        """Loop time of the last byte of an answer to a request; -inf: never. O(requests in flight)."""
        latest = max((connection.answered_at for connection in self.running), default=-math.inf)
        return max(self._answered_at, latest)

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection. Raises ReplicaFailure, or GatewayError if the gateway itself is out of resources."""
        generation = self._generation
        connection = await self._connector.connect(timeout_s)
        connection.generation = generation
        return connection

    def renew(self, connector: Connector) -> None:
        """Set the connector. Connections of the old one carry no further call."""
        self._connector = connector
        self.retire()

    def retire(self) -> None:
        """Let no present connection, open or connecting, carry a further call."""
        self._generation += 1
        self.close()

    def give_back(self, connection: Connection) -> None:
        """End of a connection's call: keep it if it can carry another."""
        self._answer_over(connection)
        if not connection.release():
            return
        if connection.generation != self._generation:
            connection.abort()
            return
        connection.lost = self._lost
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep)

    def _answer_over(self, connection: Connection) -> None:
        if connection in self.running:
            del self.running[connection]
            self._answered_at = max(self._answered_at, connection.answered_at)

    def close(self) -> None:
        """Close all idle connections."""
        if self._sweeper:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            _drop(self._idle.pop())

    def _sweep(self) -> None:
        """Close connections that were idle for KEEPALIVE_S."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_S
        for connection in self._idle:
            if connection.idle_since <= oldest:
                _drop(connection)
        self._idle = [connection for connection in self._idle if connection.alive]
        self._sweeper = loop.call_later(KEEPALIVE_S, self._sweep) if self._idle else None

    def _lost(self, connection: Connection) -> None:
        """The replica has closed an idle connection, or sent unsolicited bytes on it."""
        connection.lost = None
        if self._on_idle_closed:
            self._on_idle_closed(asyncio.get_running_loop().time() - connection.idle_since)

    def __repr__(self) -> str:
        return f"<ConnectionPool of {self._connector!r}, {len(self._idle)} idle>"


def _drop(connection: Connection) -> None:
    """Close an idle connection without calling `on_idle_closed`."""
    connection.lost = None
    connection.abort()
