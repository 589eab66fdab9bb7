"""Connections to a server that serves one at a time, and whose process ends at a connection that it cannot read a request from.

Distributed-Llama's API is one: it ends when a connection closes before the whole request was there. So:

- One connection at a time; further requests wait here for their turn, first come, first served.
- No connection is opened ahead of need, kept for another request, or opened to two addresses in parallel.
- Once connecting has begun it is awaited, also if the request is cancelled meanwhile: a connection that nobody wants any more
  gets a harmless request, and is closed after its answer has begun.
- A connection is closed when its whole request has left this process, whatever has become of the request's client.

What remains: the gateway's own process may be killed between connecting and sending, which takes microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.errors import UNREACHABLE, GatewayError, ReplicaFailure
from gateway.upstream.connection import Connection
from gateway.upstream.pool import ConnectionPool, Connector
from gateway.upstream.timeouts import Limits

DIAL_S: Final = 30.0  # in which the kernel connects, or never will
SEND_S: Final = 120.0  # in which a whole request is sent, or never will be


class FragilePool(ConnectionPool):
    """See the top of this file. `turn` before `connect`; `give_back` ends the turn, as does a `connect` that fails.

    dismissal: the harmless request.
    """

    def __init__(self, connector: Connector, on_idle_closed: Callable[[float], None] | None, dismissal: bytes) -> None:
        super().__init__(connector, on_idle_closed)
        self._dismissal = dismissal
        self._turn = asyncio.Lock()
        self._ending = set[asyncio.Task[None]]()

    @property
    def busy(self) -> bool:
        """Whether a request is there."""
        return self._turn.locked()

    async def turn(self, within_s: float) -> None:
        """Wait until no other request is there. Raises ReplicaFailure."""
        try:
            async with asyncio.timeout(within_s):
                await self._turn.acquire()
        except TimeoutError as late:
            text = f"it was busy with other requests for {within_s:g} s"
            raise ReplicaFailure("timeout", text, reached=0, blameless=True) from late

    def idle(self) -> Connection | None:
        return None

    async def connect(self, timeout_s: float) -> Connection:
        dial = asyncio.ensure_future(self._connector.connect(max(timeout_s, DIAL_S)))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial)
        except TimeoutError as late:
            self._dismiss_later(dial)
            raise ReplicaFailure(UNREACHABLE, f"no connection within {timeout_s:g} s") from late
        except asyncio.CancelledError:
            self._dismiss_later(dial)
            raise
        except BaseException:
            self._turn.release()
            raise

    def give_back(self, connection: Connection) -> None:
        self._answer_over(connection)
        self._end_later(connection)

    def _dismiss_later(self, dial: asyncio.Future[Connection]) -> None:
        self._keep(asyncio.ensure_future(self._dismiss(dial)))

    async def _dismiss(self, dial: asyncio.Future[Connection]) -> None:
        """Nobody wants the connection any more, but it may have been made, or will be. Ends the turn."""
        connection = None
        try:
            with contextlib.suppress(ReplicaFailure, GatewayError):
                connection = await dial
                connection.send(self._dismissal, to_head=False, limits=Limits(DIAL_S, DIAL_S, DIAL_S))
                await connection.wait()
        finally:
            if connection is not None:
                connection.abort()
            self._turn.release()

    def _end_later(self, connection: Connection) -> None:
        """Close it once its request was sent: at once, mostly. Ends the turn."""
        sent = asyncio.Event()
        connection.when_sent(sent.set)
        if sent.is_set():
            self._end(connection)
        else:
            self._keep(asyncio.ensure_future(self._end_when(connection, sent)))

    async def _end_when(self, connection: Connection, sent: asyncio.Event) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEND_S):
                    await sent.wait()
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.release()
        connection.abort()
        self._turn.release()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def __repr__(self) -> str:
        return f"<FragilePool of {self._connector!r}, {'busy' if self.busy else 'idle'}>"
