"""A client's connection after an upgrade.

The transport gets another protocol (`set_protocol`). The earlier protocol, which counts the connection and charges unread
bytes, still hears of those and of the end. By RFC 6455 a client must wait for the answer to its handshake; a client with
earlier bytes is refused.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource

LAST_S: Final = 5.0  # time for a client to read the last bytes and close its side


class ReplacedProtocol(Protocol):
    """The earlier protocol of the transport: `http.connection.ClientConnection`."""

    @property
    def sent_early(self) -> bool:
        """True if bytes follow the current request, or its body is incomplete."""

    def connection_lost(self, exc: Exception | None, /) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class UpgradedConnection(asyncio.Protocol):
    """Base class. To be overridden: `data_received` and `lost`.

    transport: None after its end. writable: the client reads fast enough. sources: replicas' answers, paused while it does not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.writable = True
        self.sources = set[PausableSource]()
        self._before: ReplacedProtocol | None = None
        self._waiters = list[asyncio.Future[None]]()
        self._last: asyncio.TimerHandle | None = None

    def take_over(self, request: HttpRequest, head: bytes) -> bool:
        """Answers the request with this head, and receives the following bytes. False: the client has already sent some.

        Raises ConnectionResetError if it has left.
        """
        transport = request.connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client left")
        before = cast(ReplacedProtocol, transport.get_protocol())
        if before.sent_early:
            return False
        self.transport, self._before = transport, before
        transport.set_protocol(self)
        transport.write(head)
        return True

    def lost(self) -> None:
        """The connection has ended."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._last:
            self._last.cancel()
        before, self._before = self._before, None
        self._wake()
        self.lost()
        if before:
            before.connection_lost(exc)

    def eof_received(self) -> bool:
        """Half-open connections are not supported: closes the transport."""
        return False

    def pause_writing(self) -> None:
        self.writable = False
        for source in self.sources:
            source.pause()
        if self._before:
            self._before.pause_writing()

    def resume_writing(self) -> None:
        self.writable = True
        for source in self.sources:
            source.resume()
        if self._before:
            self._before.resume_writing()
        self._wake()

    def feed_from(self, answer: PausableSource) -> None:
        """Adds an answer that is paused while the client does not read."""
        self.sources.add(answer)
        if not self.writable:
            answer.pause()

    async def drained(self) -> None:
        """Waits until the client reads, or has left."""
        while not self.writable and self.transport:
            waiter = self.loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def write(self, data: bytes) -> None:
        """Raises ConnectionResetError if the client has left."""
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client left")
        self.transport.write(data)

    def end(self) -> None:
        """Closes after the written bytes are read, within LAST_S. Idempotent."""
        if self.transport:
            self.transport.close()
            self.end_within(LAST_S)

    def end_within(self, seconds: float) -> None:
        """Aborts the connection after this time, if it has not ended."""
        if self._last is None and self.transport:
            self._last = self.loop.call_later(seconds, self.abort)

    def abort(self) -> None:
        if self.transport:
            self.transport.abort()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class UpgradedReply(ClientReply):
    """The reply on an upgraded connection that has ended: nothing more is written."""
