"""WebSockets to a replica: the upgrade request, its answer, and then bytes in both directions.

    GET /v1/realtime?model=M ──► Lifecycle, as any request ──► 101: bytes in both directions, until one side ends
                                                           └─► any other answer: plain HTTP

The replica does the handshake: its key and subprotocol pass, and so do all frames. Extensions are not offered to it, because
usage cannot be read in compressed frames; reported usage is the request's (`usage_tap.py`), and features learn of each answer
when it passes (`Extensions.answered`). Before the 101, other replicas are tried, as for any request before its first byte.
Afterwards the gateway only ends a session, with a close frame after the replica's last complete frame:

    1011    the replica has ended                 1008    a feature refuses further answers: a budget is spent
    1001    the gateway shuts down                        more than MAX_FRAMES in one read, which may hide usage
                                                          the client names a model that its key may not use
    1000    no message for `timeouts.idle_s`, after one of the client for `timeouts.first_byte_s`; pings are none

A session holds a slot of its pool, idle or not, so one client may have sessions in 1 / SHARE of them. A side that is not read
pauses the other one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.admission.cors import require_origin
from gateway.config.live import Live
from gateway.config.schema import TimeoutConfig
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError, bad_request, shutting_down
from gateway.features.websocket.boundaries import MAX_FRAMES, Boundaries, MessageTap
from gateway.features.websocket.client_tap import ClientTap
from gateway.features.websocket.frames import GOING_AWAY, INTERNAL_ERROR, NORMAL, POLICY, close_frame
from gateway.features.websocket.takeover import UpgradedConnection, UpgradedReply
from gateway.features.websocket.usage_tap import UsageTap
from gateway.request.client import Caller, ClientReply, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.lifecycle import Lifecycle
from gateway.request.rights import Rights
from gateway.request.running import RunningRequests
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource, ReplicaAnswer
from gateway.upstream.headers import upstream_headers
from gateway.upstream.http1 import SWITCHING

TUNNELED: Final = frozenset(["/v1/realtime"])  # paths of engines' WebSockets
SHARE: Final = 4

_EXTENSIONS: Final = b"sec-websocket-extensions"
_HEAD: Final = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nServer: warmroute\r\n"


class Tunnels:
    """Serves the connections of one gateway."""

    def __init__(self, *, live: Live, lifecycle: Lifecycle, running: RunningRequests, extensions: Extensions) -> None:
        self._live = live
        self._lifecycle = lifecycle
        self._running = running
        self._extensions = extensions
        self._sessions = dict[tuple[str, str], int]()  # by pool and client
        extensions.upgrading.append(self._enter)

    async def serve(self, request: HttpRequest) -> ClientReply:
        """Serves a connection until its end; any other answer than a 101 is returned. Raises as `Lifecycle.serve`."""
        require_origin(self._live.cors_origins, request.headers.get("Origin"))
        if self._running.draining:
            raise shutting_down()
        upgrade = UpgradeRequest(request, self._running, self._extensions, self._live.config.timeouts)
        try:
            reply = await self._lifecycle.serve(upgrade)
        finally:
            self._leave(upgrade)
        if not isinstance(reply, TunnelReply):
            return reply
        if reply.plain:
            return reply.plain
        await reply.ended()
        return UpgradedReply()

    def _enter(self, exchange: Exchange) -> None:
        """Counts a session of its client. Raises GatewayError 429."""
        upgrade, grant, target = exchange.request, exchange.caller.grant, exchange.target
        assert isinstance(upgrade, UpgradeRequest), "nothing else upgrades"
        upgrade.exchange = exchange
        held = target.pool, grant.id if grant is not None else upgrade.lease.account.client
        most, count = max(1, target.admission.max_inflight // SHARE), self._sessions.get(held, 0)
        if count >= most:
            text = f"This client has {count} sessions open, and may not have more: end one of them."
            raise GatewayError(429, "too_many_sessions", text)
        self._sessions[held] = count + 1
        upgrade.held = held

    def _leave(self, upgrade: UpgradeRequest) -> None:
        if (held := upgrade.held) is None:
            return
        left = self._sessions.pop(held) - 1
        if left:
            self._sessions[held] = left


class UpgradeRequest(ClientRequest):
    """An upgrade request to a replica. opening: the client's request. exchange: None before it has a pool. held: the pool and
    the client of a counted session.
    """

    def __init__(self, opening: HttpRequest, running: RunningRequests, extensions: Extensions, timeouts: TimeoutConfig) -> None:
        super().__init__(opening.method, opening.path, opening.target, opening.headers, opening.lease)
        self.upgrades = True
        self.opened_by = opening
        self.opening = opening
        self.timeouts = timeouts
        self.exchange: Exchange | None = None
        self.held: tuple[str, str] | None = None
        self._running = running
        self._extensions = extensions

    def answered(self, usage: Usage | None, known: Usage) -> None:
        """An answer has passed. known: of an answer without usage. Raises GatewayError if it is to be the last one."""
        assert self.exchange is not None, "it has a pool"
        for answered in self._extensions.answered:
            answered(self.exchange, usage, known)

    def refused(self, reason: str) -> None:
        """The session is ended for this reason, which the request's log line gets."""
        assert self.exchange is not None, "it has a pool"
        self.exchange.attempts.error = reason

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

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> ClientReply:
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
        self._tap = UsageTap(self._heard)
        self._boundaries = Boundaries(self._tap)  # of the replica's frames
        self._loop = asyncio.get_running_loop()
        self._until = 0.0  # without a further message, the session ends then
        self._idle: asyncio.TimerHandle | None = None

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        """Raises GatewayError 400 for a client that has not waited for the handshake."""
        if status != SWITCHING:
            self.plain = self._request.opening.reply(keep_alive=self.keep_alive, patience_s=self._patience_s)
            self.plain.begin(status, headers, length=length, first=first)
            self.begun = True
            return
        socket = TunnelSocket(self._loop, self)
        if not socket.take_over(self._request.opening, b"%b%b\r\n" % (_HEAD, headers)):
            raise bad_request("A client must wait for the answer to its handshake before it sends a message.")
        self._socket = socket
        self.begun = True
        self._heard()
        self._check_idle()
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
            if answers := self._tap.take():
                self._count(answers)

    @property
    def grant(self) -> Rights | None:
        """The rights of the client's key."""
        exchange = self._request.exchange
        return None if exchange is None else exchange.caller.grant

    @property
    def model(self) -> str:
        """The handshake's model, whose price the answers have; "": it names none."""
        exchange = self._request.exchange
        return "" if exchange is None else exchange.api.model

    def _heard(self) -> None:
        """The replica has sent a message."""
        self._until = max(self._until, self._loop.time() + self._request.timeouts.idle_s)

    def asked(self) -> None:
        """The client has sent a message, for which the replica may have to compute a prompt."""
        timeouts = self._request.timeouts
        self._until = max(self._until, self._loop.time() + max(timeouts.idle_s, timeouts.first_byte_s))

    def left(self) -> None:
        """The client has left, or ends the session: a part of an answer that it has is counted. Idempotent."""
        asked = self._socket.asked if self._socket else None
        if self._tap.leave(wanted=asked is not None and asked.wanted):
            self.unread = True
            self._count(self._tap.take())

    def _count(self, answers: list[Usage | None]) -> None:
        """Ends the session if it may not have further answers."""
        refused: GatewayError | None = None
        asked = self._socket.asked if self._socket else None
        for usage in answers:
            try:
                self._request.answered(usage, self._tap.known(asked.tokens if asked else 0))
            except GatewayError as error:
                refused = error
        if asked:
            asked.answered()
        if self._boundaries.lost:
            self._end(POLICY, f"more than {MAX_FRAMES} frames at once")
        elif refused is not None:
            self._end(POLICY, refused.message)

    def _check_idle(self) -> None:
        if self._socket is None or self._socket.transport is None:
            return
        if self._loop.time() < self._until:
            self._idle = self._loop.call_at(self._until, self._check_idle)
        else:
            self._end(NORMAL, f"no message for {self._request.timeouts.idle_s:g} s")

    def _end(self, code: int, reason: str) -> None:
        """Ends the session; its client's side first, which ends the request."""
        self.satisfied = True
        if code == POLICY:
            self._request.refused(reason)
        self._close(code, reason)

    def forbid(self, error: GatewayError) -> None:
        """Ends the session, because of a message of its client."""
        self._end(POLICY, error.message)

    def end(self, last: bytes = b"") -> None:
        if self.plain:
            self.plain.end(last)
        elif self._socket:
            self.left()
            self._close(INTERNAL_ERROR, "the connection to the replica has ended")

    def cut(self) -> None:
        if self.plain:
            self.plain.cut()
        elif self._socket:
            if self.satisfied:  # else the replica has failed
                self.left()
            if self._socket.writable:
                self._close(INTERNAL_ERROR, "the connection to the replica has ended")
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
        if self._idle:
            self._idle.cancel()

    def _close(self, code: int, reason: str) -> None:
        """Closes the client's side."""
        socket = self._socket
        if socket is None or socket.transport is None or socket.transport.is_closing():
            return
        if self._running.over and self._boundaries.between:
            socket.write(close_frame(GOING_AWAY, "the gateway is shutting down"))
        elif not self._boundaries.closing and self._boundaries.between:
            socket.write(close_frame(code, reason))
        elif not self._boundaries.closing:
            socket.abort()
            return
        socket.end()

    def __repr__(self) -> str:
        return f"<TunnelReply {'plain' if self.plain else 'upgraded' if self._socket else 'not begun'}>"


class TunnelSocket(UpgradedConnection):
    """The client's side of a tunnel."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reply: TunnelReply) -> None:
        super().__init__(loop)
        self._reply: TunnelReply | None = reply
        self._answer: ReplicaAnswer | None = None
        self._request: UpgradeRequest | None = None
        grant = reply.grant
        self.asked = None if grant is None else ClientTap(reply.asked, grant, reply.model)
        self._boundaries = Boundaries(self.asked or MessageTap(reply.asked))  # of the client's frames
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
            try:
                self._boundaries.feed(data)
            except GatewayError as error:  # the replica does not get the end of this message
                if self._reply:
                    self._reply.forbid(error)
                return
            if self._reply and self._boundaries.closing:
                self._reply.satisfied = True
            self._answer.forward(data)

    def lost(self) -> None:
        self._hold(False)
        if self._reply and self._answer:
            self._reply.left()
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
