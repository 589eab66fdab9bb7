"""A client's WebSocket of text messages: what comes as whole messages, each with its own lease of the memory budget.

    bytes ── FrameReader ──► pieces, charged as they come ──► Message ──► inbox ──► next

A message that the budget has no room for is read to its end and dropped: its taker answers with an error. Reading pauses while
MAX_WAITING messages wait to be taken, and between the turns of a read with very many frames. Pings are answered, the last one
of a turn only, as RFC 6455 allows.

Ends: the client closes, or leaves (`next` returns None); it breaks a rule of the protocol; it is idle for
`limits.client_idle_s` with nothing running (`busy`), or takes `limits.body_s` for one message; while something runs it is
pinged, and dropped if it answers nothing for `timeouts.idle_s`. Whoever closes waits LAST_S for the other side. `refused` has
the reason where a message could not be read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from io import BytesIO
from typing import Final

from gateway.admission.memory import ClientAccount, MemoryLease, peak_of
from gateway.config.live import Live
from gateway.errors import GatewayError, over_budget
from gateway.features.websocket import frames
from gateway.features.websocket.frames import CLOSE, PING, TEXT, Frame, FrameError, FrameReader
from gateway.features.websocket.takeover import LAST_S, UpgradedConnection
from gateway.turns import turns_of

MAX_WAITING: Final = 16  # whole messages that are not taken yet
PING_S: Final = 20.0  # of silence while something runs, after which the client is pinged
_LOOKS: Final = 4  # in an idle time


class Message:
    """data: its text, empty if the budget had no room (`refusal`). lease: what it holds of the budget; its taker closes it."""

    __slots__ = ("data", "lease", "refusal")

    def __init__(self, data: bytes, lease: MemoryLease, refusal: GatewayError | None) -> None:
        self.data = data
        self.lease = lease
        self.refusal = refusal


class MessageSocket(UpgradedConnection):
    """See the top of this file. busy: whether a request of this client runs, or waits to. refused: is called with why a message
    could not be read, after the close frame. closing: a close frame went out.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        live: Live,
        account: ClientAccount,
        busy: Callable[[], bool],
        refused: Callable[[GatewayError], None],
    ) -> None:
        super().__init__(loop)
        self._refused = refused
        self.closing = False
        self._live = live
        self._account = account
        self._busy = busy
        self._reader = FrameReader(live.max_body)
        self._inbox = deque[Message]()
        self._taker: asyncio.Future[None] | None = None
        self._lease: MemoryLease | None = None  # of the message that is being received
        self._pieces = BytesIO()
        self._size = 0
        self._begun = 0.0  # loop times
        self._heard = loop.time()
        self._pinged = 0.0
        self._ping: bytes | None = None  # to be answered
        self._stopped = self._scheduled = False  # reading is paused; a turn of `_read` will come
        self._over = False  # nothing more is taken
        self._timer = loop.call_later(self._interval(), self._look)

    # -- the owner's side

    async def next(self) -> Message | None:
        """The next message; None: the client has left, or the connection is being closed."""
        while not (self._inbox or self._over):
            self._taker = self.loop.create_future()
            await self._taker
        if self._over:
            return None
        message = self._inbox.popleft()
        self._hold_back()
        return message

    def send(self, data: bytes) -> None:
        """Frames. Raises ConnectionResetError if the client has left, or the connection is being closed."""
        if self.closing:
            raise ConnectionResetError("the connection is being closed")
        self.write(data)

    def close(self, code: int, reason: str = "") -> None:
        """Begin to close: the client has LAST_S to do so, too. Idempotent."""
        if not self.closing and self.transport:
            self.closing = True
            self.transport.write(frames.close_frame(code, reason))
            self.end_within(LAST_S)
        self._stop()

    def used(self) -> None:
        """Something that was running has ended: the idle time begins."""
        self._heard = self.loop.time()

    async def ended(self) -> None:
        """Wait for the end of the connection, after `close`."""
        while self.transport:
            self._taker = self.loop.create_future()
            await self._taker

    # -- the transport's side

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._reader.feed(data)
        if not self._scheduled:
            self._read()

    def lost(self) -> None:
        self._timer.cancel()
        self._stop()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_ping()

    def _read(self) -> None:
        """The frames of one turn."""
        self._scheduled = False
        reader = self._reader
        for frame in reader.read():
            self._take(frame)
        self._answer_ping()
        if reader.error:
            self._fail(reader.error)
        elif reader.more and self.transport:
            self._scheduled = True
            turns_of(self.loop).later(self._read)
        self._hold_back()

    def _take(self, frame: Frame) -> None:
        if frame.kind == TEXT:
            if not self._over:
                self._keep(frame)
        elif frame.kind == PING:
            self._ping = frame.data
        elif frame.kind == CLOSE:
            self._closed(frames.code_of(frame.data))

    def _keep(self, frame: Frame) -> None:
        """A piece of a message."""
        if self._lease is None:
            self._lease = self._account.lease()
            self._begun = self._heard
        lease = self._lease
        self._size += len(frame.data)
        if not lease.refused:
            if lease.grow(len(frame.data)):
                self._pieces.write(frame.data)
            else:
                self._pieces = BytesIO()
                lease.drop_body()
        if frame.last:
            refusal = over_budget(peak_of(self._size), lease.account.largest, self._size) if lease.refused else None
            self._inbox.append(Message(self._pieces.getvalue(), lease, refusal))
            self._lease, self._pieces, self._size = None, BytesIO(), 0
            self._wake_taker()

    def _closed(self, code: int) -> None:
        """The client closes."""
        if not self.closing and self.transport:
            self.closing = True
            self.transport.write(frames.close_frame(code))
        self._stop()
        self.end()

    def _answer_ping(self) -> None:
        if self._ping is not None and self.writable and not self.closing and self.transport:
            self.transport.write(frames.pong_frame(self._ping))
            self._ping = None

    def _hold_back(self) -> None:
        """Read, or do not."""
        stop = not self._over and (self._scheduled or len(self._inbox) >= MAX_WAITING)
        if stop != self._stopped and self.transport and not self.transport.is_closing():
            self._stopped = stop
            if stop:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # -- its end

    def _fail(self, error: FrameError) -> None:
        """Close, although what comes can no longer be read: that the client closes, too, shows in the end of its bytes."""
        if not self.closing and self.transport and not self.transport.is_closing():
            self.close(error.code, error.reason)
            self.transport.write_eof()
            self._refused(_fault_of(error))

    def _stop(self) -> None:
        """Take no further message, and drop those that wait."""
        self._over = True
        if self._lease:
            self._lease.close()
            self._lease = None
        while self._inbox:
            self._inbox.popleft().lease.close()
        self._pieces = BytesIO()
        self._hold_back()
        self._wake_taker()

    def _wake_taker(self) -> None:
        if self._taker and not self._taker.done():
            self._taker.set_result(None)

    def _interval(self) -> float:
        return min(PING_S, self._live.config.limits.client_idle_s / _LOOKS)

    def _look(self) -> None:
        """Whether it has been silent for too long."""
        if self.transport is None:
            return
        self._timer = self.loop.call_later(self._interval(), self._look)
        limits, now = self._live.config.limits, self.loop.time()
        silent_s = now - self._heard
        if self.closing:
            return
        if self._lease and now - self._begun >= limits.body_s:
            text = f"a message took longer than {limits.body_s:g} s"
            self.close(frames.POLICY, text)
            self._refused(GatewayError(408, "request_timeout", f"{text}."))
        elif not self._busy():
            if silent_s >= limits.client_idle_s:
                self.close(frames.NORMAL, f"idle for {limits.client_idle_s:g} s")
        elif self.writable and silent_s >= self._interval():
            if self._pinged <= self._heard:
                self._pinged = now
                self.transport.write(frames.ping_frame())
            elif now - self._pinged >= self._live.patience_s:
                self.abort()

    def __repr__(self) -> str:
        state = "closed" if self.transport is None else "closing" if self.closing else "open"
        return f"<MessageSocket {state}, {len(self._inbox)} messages, {self._reader!r}>"


def _fault_of(error: FrameError) -> GatewayError:
    """As HTTP has it."""
    if error.code == frames.TOO_LARGE:
        return GatewayError(413, "request_too_large", f"{error.reason}.")
    return GatewayError(400, "websocket_protocol", f"{error.reason}.")
