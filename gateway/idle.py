"""The idle connections to one replica; new ones come from a `Dialer`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from gateway.dialer import Dialer
from gateway.resolver import Resolver
from gateway.upstream import Connection

# vLLM and other uvicorn servers close idle connections after 5 s; a pooled one must be gone before that.
KEEPALIVE_S: Final = 4.0


class Pool:
    """The connections to one address. `idle` gives one, `connect` makes one; `give_back` keeps it if it is still good."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None, resolver: Resolver | None = None) -> None:
        self._dialer = Dialer(host, port, tls, resolver or Resolver())
        self._idle: list[Connection] = []  # the one used last is the last
        self._sweeper: asyncio.TimerHandle | None = None

    def idle(self) -> Connection | None:
        """The idle connection that was used last, if one is fresh enough."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and loop.time() - connection.idle_since < KEEPALIVE_S and connection.quiet:
                return connection
            connection.abort()
        return None

    async def connect(self, timeout_s: float) -> Connection:
        """A new connection. Raises ReplicaFailure, or GatewayError where the gateway itself is out of resources."""
        return await self._dialer.connect(timeout_s)

    def give_back(self, connection: Connection) -> None:
        """Its call is over."""
        if not connection.release():
            return
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep)

    def close(self) -> None:
        """Close what is idle."""
        if self._sweeper:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            self._idle.pop().abort()

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_S
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.abort()
        self._idle = [connection for connection in self._idle if connection.alive]
        self._sweeper = loop.call_later(KEEPALIVE_S, self._sweep) if self._idle else None

    def __repr__(self) -> str:
        return f"<Pool of {self._dialer.host}:{self._dialer.port}, {len(self._idle)} idle>"
