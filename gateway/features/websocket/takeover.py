"""A client's connection after an upgrade.

The transport is given another protocol (`set_protocol`); the one that it had, which counts the connection and charges what its
client does not read, goes on to hear of that and of the end. RFC 6455 has clients wait for the answer to their handshake: one
that has sent anything before is refused.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource

LAST_S: Final = 5.0  # for a client to close its side, and to read what is written, after the last byte


class ReplacedProtocol(Protocol):
    """The protocol that a transport had: `http.connection.ClientConnection`."""

    @property
    def sent_early(self) -> bool:
        """Whether anything has come behind the request that is being answered, or some of its body is still to come."""

    def connection_lost(self, exc: Exception | None, /) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class UpgradedConnection(asyncio.Protocol):
    """Base class. To be overridden: `data_received`, and `lost`.

    transport: None once it is lost. writable: the client keeps up. sources: replicas' answers, paused while it does not.
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
        """Answer the request with this head, and have the bytes that follow. False: the client has sent some already.

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
        """No half-open connections: the transport is closed."""
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
        """Another answer that is to be paused while the client does not keep up."""
        self.sources.add(answer)
        if not self.writable:
            answer.pause()

    async def drained(self) -> None:
        """Wait until the client keeps up, or has left."""
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
        """Close, once what is written was read, which has LAST_S. Idempotent."""
        if self.transport:
            self.transport.close()
            self.end_within(LAST_S)

    def end_within(self, seconds: float) -> None:
        """Drop the connection then, if it has not ended."""
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
    """The reply on a connection that was upgraded and has ended: there is nothing more to write."""
