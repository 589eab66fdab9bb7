"""Connections to a server that serves one request at a time, and crashes at a connection without a complete request.

Distributed-Llama's API crashes when a connection closes before a whole request was received. So:

- One connection at a time; further requests wait here for their turn, first come, first served.
- No connection is opened ahead of need, kept for another request, or opened to two addresses in parallel.
- Once connecting has begun it is awaited, even if the request is cancelled: then the unused connection gets a harmless request,
  and
  is closed after its answer has begun.
- A connection is closed only after its whole request has left this process, even if the client has disconnected.
- If a client disconnects before the answer begins, the connection stays open until the answer begins: the server works on,
  because it notices a missing reader only when it writes. The turn lasts until then, or until the request's first-byte timeout.
  A probe's connection is closed at once, because a server that does not answer probes must be noticed.

Two risks remain. The gateway's process may be killed between connecting and sending, which takes microseconds. And a server may
not read: after SEND_S a connection is closed within its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.errors import UNREACHABLE, GatewayError, ReplicaFailure
from gateway.upstream.connection import Connection
from gateway.upstream.pool import ConnectionPool, Connector
from gateway.upstream.timeouts import UpstreamTimeouts

# Linux tries to connect for 127 s. The gateway gives up after 30 s: five SYNs were not answered by then, and it is unlikely
# that the server accepts at that very moment.
DIAL_S: Final = 30.0
SEND_S: Final = 120.0  # for the rest of a request to be sent, after its client has disconnected


class FragilePool(ConnectionPool):
    """Connections to a fragile server (see the module). `turn` before `connect`; `give_back` ends the turn, as does a failed
    `connect`.

    turns: the lock of the server, shared by all of its pools. dismissal: the harmless request.
    """

    def __init__(
        self,
        connector: Connector,
        on_idle_closed: Callable[[float], None] | None,
        dismissal: bytes,
        turns: asyncio.Lock,
        send_s: float = SEND_S,
    ) -> None:
        super().__init__(connector, on_idle_closed)
        self._dismissal = dismissal
        self._turns = turns
        self._send_s = send_s
        self._ending = set[asyncio.Task[None]]()

    @property
    def busy(self) -> bool:
        """True if a request is running, or the server still works for one."""
        return self._turns.locked()

    async def turn(self, within_s: float) -> None:
        """Wait until no other request is running. Raises ReplicaFailure."""
        try:
            async with asyncio.timeout(within_s):
                await self._turns.acquire()
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
            self._turns.release()
            raise

    def give_back(self, connection: Connection) -> None:
        """Close the connection once its request was sent, and its answer has begun: mostly at once. Then the turn ends."""
        sent = asyncio.Event()
        connection.when_sent(sent.set)
        if sent.is_set() and not self._works_on(connection):
            self._end(connection)
        else:
            self._keep(asyncio.ensure_future(self._end_later(connection, sent)))

    def _dismiss_later(self, dial: asyncio.Future[Connection]) -> None:
        self._keep(asyncio.ensure_future(self._dismiss(dial)))

    async def _dismiss(self, dial: asyncio.Future[Connection]) -> None:
        """Dismiss an unused connection, which may have been made, or will be. Ends the turn."""
        connection = None
        try:
            with contextlib.suppress(ReplicaFailure, GatewayError):
                connection = await dial
                connection.send(self._dismissal, to_head=False, limits=UpstreamTimeouts(DIAL_S, DIAL_S, DIAL_S))
                await connection.wait()
        finally:
            if connection is not None:
                connection.abort()
            self._turns.release()

    def _works_on(self, connection: Connection) -> bool:
        """True if the connection carries a request, not a probe, and the server has not begun its answer."""
        return self.carries(connection) and connection.awaits_answer

    async def _end_later(self, connection: Connection, sent: asyncio.Event) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._send_s):
                    await sent.wait()
            if sent.is_set() and self._works_on(connection):
                with contextlib.suppress(ReplicaFailure):
                    await connection.wait()  # limited by its timeouts
        finally:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        self._answer_over(connection)
        connection.release()
        connection.abort()
        self._turns.release()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def __repr__(self) -> str:
        return f"<FragilePool of {self._connector!r}, {'busy' if self.busy else 'idle'}>"
