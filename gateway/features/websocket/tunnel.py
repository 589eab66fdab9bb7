"""WebSockets to a replica: the upgrade request, its answer, and then bytes in both directions.

    GET /v1/realtime?model=M ──► Lifecycle, as any request ──► 101: bytes in both directions, until one side ends
                                                           └─► any other answer: plain HTTP

The replica does the handshake: its key and subprotocol pass, and so do all frames. Extensions are not offered to it, because
usage cannot be read in compressed frames; reported usage is the request's (`usage_tap.py`). Before the 101, other replicas are
tried, as for any request before its first byte. Afterwards the gateway only reports the end of a connection, with a close frame
after the replica's last complete frame: 1011 if the replica has ended or nothing passes for `timeouts.idle_s`, 1001 if the
gateway shuts down. A side that is not read pauses the other one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.admission.cors import require_origin
from gateway.config.live import Live
from gateway.errors import bad_request, shutting_down
from gateway.features.websocket.boundaries import Boundaries
from gateway.features.websocket.frames import GOING_AWAY, INTERNAL_ERROR, close_frame
from gateway.features.websocket.takeover import UpgradedConnection, UpgradedReply
from gateway.features.websocket.usage_tap import UsageTap
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.lifecycle import Lifecycle
from gateway.request.running import RunningRequests
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource, ReplicaAnswer
from gateway.upstream.headers import upstream_headers
from gateway.upstream.http1 import SWITCHING

TUNNELED: Final = frozenset(["/v1/realtime"])  # paths of engines' WebSockets

_EXTENSIONS: Final = b"sec-websocket-extensions"
_HEAD: Final = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nServer: warmroute\r\n"


class Tunnels:
    """Serves the connections of one gateway."""

    def __init__(self, *, live: Live, lifecycle: Lifecycle, running: RunningRequests) -> None:
        self._live = live
        self._lifecycle = lifecycle
        self._running = running

    async def serve(self, request: HttpRequest) -> ClientReply:
        """Serves a connection until its end; any other answer than a 101 is returned. Raises as `Lifecycle.serve`."""
        require_origin(self._live.cors_origins, request.headers.get("Origin"))
        if self._running.draining:
            raise shutting_down()
        upgrade = UpgradeRequest(request, self._running)
        reply = await self._lifecycle.serve(upgrade)
        if not isinstance(reply, TunnelReply):
            return reply
        if reply.plain:
            return reply.plain
        await reply.ended()
        return UpgradedReply()


class UpgradeRequest(ClientRequest):
    """An upgrade request to a replica. opening: the client's request."""

    def __init__(self, opening: HttpRequest, running: RunningRequests) -> None:
        super().__init__(opening.method, opening.path, opening.target, opening.headers, opening.lease)
        self.upgrades = True
        self.opened_by = opening
        self.opening = opening
        self._running = running

    def caller(self) -> Caller:
        return self.opening.caller()

    def upstream_headers(self) -> bytes:
        pairs = [pair for pair in self.opening.head.headers if pair[0].lower() != _EXTENSIONS]
        return upstream_headers(pairs)

    @property
    def here(self) -> bool:
        """True: it has no body."""
        return True

    @property
    def complete(self) -> bool:
        return self.opening.complete

    def take(self) -> bytes:
        return b""

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        return TunnelReply(self, self._running, keep_alive=keep_alive, patience_s=patience_s)


class TunnelReply(ClientReply):
    """The answer to an upgrade request. plain: the reply if the answer is not a 101."""

    def __init__(self, request: UpgradeRequest, running: RunningRequests, *, keep_alive: bool, patience_s: float) -> None:
        super().__init__()
        self.plain: ClientReply | None = None
        self.keep_alive = keep_alive
        self._request = request
        self._running = running
        self._patience_s = patience_s
        self._socket: TunnelSocket | None = None
        self._tap = UsageTap()
        self._boundaries = Boundaries(self._tap)  # of the replica's frames

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        """Raises GatewayError 400 for a client that has not waited for the handshake."""
        if status != SWITCHING:
            self.plain = self._request.opening.reply(keep_alive=self.keep_alive, patience_s=self._patience_s)
            self.plain.begin(status, headers, length=length, first=first)
            self.begun = True
            return
        socket = TunnelSocket(asyncio.get_running_loop(), self)
        if not socket.take_over(self._request.opening, b"%b%b\r\n" % (_HEAD, headers)):
            raise bad_request("A client must wait for the answer to its handshake before it sends a message.")
        self._socket = socket
        self.begun = True
        if first:
            self.write(first)

    def write(self, data: bytes) -> None:
        if self.plain:
            self.plain.write(data)
        elif self._socket:
            self._boundaries.feed(data)
            self.usage, self.unread = self._tap.usage, self._tap.unread
            self.satisfied = self.satisfied or self._boundaries.closing
            self._socket.write(data)

    def end(self, last: bytes = b"") -> None:
        if self.plain:
            self.plain.end(last)
        elif self._socket:
            self._close()

    def cut(self) -> None:
        if self.plain:
            self.plain.cut()
        elif self._socket:
            if self._socket.writable:
                self._close()
            else:
                self._socket.abort()

    def feed_from(self, answer: PausableSource | None) -> None:
        if self.plain:
            self.plain.feed_from(answer)
        elif self._socket:
            assert answer is None or isinstance(answer, ReplicaAnswer)  # nothing else switches protocols
            self._socket.connect(answer, self._request)

    async def ended(self) -> None:
        """Waits for the end of the connection."""
        if self._socket:
            await self._socket.ended()

    def _close(self) -> None:
        """Closes the client's side, because the replica's side has ended."""
        socket = self._socket
        if socket is None or socket.transport is None or socket.transport.is_closing():
            return
        if self._running.over and self._boundaries.between:
            socket.write(close_frame(GOING_AWAY, "the gateway is shutting down"))
        elif not self._boundaries.closing and self._boundaries.between:
            socket.write(close_frame(INTERNAL_ERROR, "the connection to the replica has ended"))
        elif not self._boundaries.closing:
            socket.abort()
            return
        socket.end()

    def __repr__(self) -> str:
        return f"<TunnelReply {'plain' if self.plain else 'upgraded' if self._socket else 'not begun'}>"


class TunnelSocket(UpgradedConnection):
    """The client's side of a tunnel."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reply: ClientReply) -> None:
        super().__init__(loop)
        self._reply: ClientReply | None = reply
        self._answer: ReplicaAnswer | None = None
        self._request: UpgradeRequest | None = None
        self._boundaries = Boundaries()  # of the client's frames
        self._charged = 0  # bytes not read by the replica
        self._end: asyncio.Future[None] | None = None

    def connect(self, answer: ReplicaAnswer | None, request: UpgradeRequest) -> None:
        """Connects both directions. None: the replica's side has ended."""
        self._hold(False)
        self.sources.clear()
        self._answer, self._request = answer, request
        if answer:
            self.feed_from(answer)
            answer.when_held(self._hold)

    def data_received(self, data: bytes) -> None:
        """Forwards; after the end of the replica's side, bytes are dropped."""
        if self._answer:
            self._boundaries.feed(data)
            if self._reply and self._boundaries.closing:
                self._reply.satisfied = True
            self._answer.forward(data)

    def lost(self) -> None:
        self._hold(False)
        self._answer = self._request = self._reply = None
        if self._end and not self._end.done():
            self._end.set_result(None)

    async def ended(self) -> None:
        while self.transport:
            self._end = self.loop.create_future()
            await self._end

    def _hold(self, on: bool) -> None:
        """on: the replica does not read forwarded bytes; otherwise it reads again."""
        transport, request = self.transport, self._request
        if transport is None or transport.is_closing():
            return
        if on and self._answer and request:
            transport.pause_reading()
            size = self._answer.unsent - self._charged
            if not request.lease.grow(max(0, size)):
                self.abort()
            else:
                self._charged += max(0, size)
        elif not on:
            if request:
                request.lease.shrink(self._charged)
            self._charged = 0
            transport.resume_reading()
