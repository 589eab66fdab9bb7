"""A client's WebSocket of text messages. Each complete message has its own lease of the memory budget.

    bytes ── FrameReader ──► pieces, charged on arrival ──► Message ──► inbox ──► next

A message beyond the budget is read to its end and dropped; the consumer answers with an error. Reading pauses while MAX_WAITING
messages wait, and between the turns of a read with very many frames. Pings are answered, only the last one of each turn, as RFC
6455 allows.

The connection ends when the client closes or leaves (`next` returns None), violates the protocol, is idle for
`limits.client_idle_s` without a running request (`busy`), or takes `limits.body_s` for one message. While a request runs, the
client is pinged, and dropped without any answer for `timeouts.idle_s`. After a close frame, the other side has LAST_S.
`refused` is called with the reason if a message could not be read.
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

MAX_WAITING: Final = 16  # complete messages
PING_S: Final = 20.0  # silence before a ping, while a request runs
_CHECKS: Final = 4  # per idle time


class Message:
    """data: the text, empty without memory (`refusal`). lease: its memory, to be closed by the consumer."""

    __slots__ = ("data", "lease", "refusal")

    def __init__(self, data: bytes, lease: MemoryLease, refusal: GatewayError | None) -> None:
        self.data = data
        self.lease = lease
        self.refusal = refusal


class MessageSocket(UpgradedConnection):
    """busy: returns True while a request of this client runs or waits. refused: called with the reason why a message could not
    be read, after the close frame. closing: a close frame was sent.
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
        self._consumer: asyncio.Future[None] | None = None
        self._lease: MemoryLease | None = None  # of the message being received
        self._pieces = BytesIO()
        self._size = 0
        self._begun = 0.0  # loop times
        self._heard = loop.time()
        self._pinged = 0.0
        self._ping: bytes | None = None  # payload of a ping to answer
        self._stopped = self._scheduled = False  # reading is paused; a turn of `_read` is scheduled
        self._ended = False  # no further messages
        self._timer = loop.call_later(self._interval(), self._check_silence)

    # -- for the owner

    async def next(self) -> Message | None:
        """The next message. None: the client has left, or the connection is closing."""
        while not (self._inbox or self._ended):
            self._consumer = self.loop.create_future()
            await self._consumer
        if self._ended:
            return None
        message = self._inbox.popleft()
        self._update_reading()
        return message

    def send(self, data: bytes) -> None:
        """Sends frames. Raises ConnectionResetError if the client has left, or the connection is closing."""
        if self.closing:
            raise ConnectionResetError("the connection is closing")
        self.write(data)

    def close(self, code: int, reason: str = "") -> None:
        """Sends a close frame. The client has LAST_S to answer. Idempotent."""
        if not self.closing and self.transport:
            self.closing = True
            self.transport.write(frames.close_frame(code, reason))
            self.end_within(LAST_S)
        self._stop()

    def restart_idle_time(self) -> None:
        """A request has ended, so the idle time begins."""
        self._heard = self.loop.time()

    async def ended(self) -> None:
        """Waits for the end of the connection, after `close`."""
        while self.transport:
            self._consumer = self.loop.create_future()
            await self._consumer

    # -- called by the transport

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
        """Reads the frames of one turn."""
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
        self._update_reading()

    def _take(self, frame: Frame) -> None:
        if frame.kind == TEXT:
            if not self._ended:
                self._append(frame)
        elif frame.kind == PING:
            self._ping = frame.data
        elif frame.kind == CLOSE:
            self._answer_close(frames.code_of(frame.data))

    def _append(self, frame: Frame) -> None:
        """Adds a piece of a message."""
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
            self._wake_consumer()

    def _answer_close(self, code: int) -> None:
        """The client has sent a close frame."""
        if not self.closing and self.transport:
            self.closing = True
            self.transport.write(frames.close_frame(code))
        self._stop()
        self.end()

    def _answer_ping(self) -> None:
        if self._ping is not None and self.writable and not self.closing and self.transport:
            self.transport.write(frames.pong_frame(self._ping))
            self._ping = None

    def _update_reading(self) -> None:
        """Pauses or resumes reading."""
        stop = not self._ended and (self._scheduled or len(self._inbox) >= MAX_WAITING)
        if stop != self._stopped and self.transport and not self.transport.is_closing():
            self._stopped = stop
            if stop:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # -- ends

    def _fail(self, error: FrameError) -> None:
        """Closes after a violation. The following bytes cannot be parsed; the client's close shows in the end of its bytes."""
        if not self.closing and self.transport and not self.transport.is_closing():
            self.close(error.code, error.reason)
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self._refused(_fault_of(error))

    def _stop(self) -> None:
        """Accepts no further message, and drops waiting ones."""
        self._ended = True
        if self._lease:
            self._lease.close()
            self._lease = None
        while self._inbox:
            self._inbox.popleft().lease.close()
        self._pieces = BytesIO()
        self._update_reading()
        self._wake_consumer()

    def _wake_consumer(self) -> None:
        if self._consumer and not self._consumer.done():
            self._consumer.set_result(None)

    def _interval(self) -> float:
        return min(PING_S, self._live.config.limits.client_idle_s / _CHECKS)

    def _check_silence(self) -> None:
        """Ends the connection after too much silence."""
        if self.transport is None:
            return
        self._timer = self.loop.call_later(self._interval(), self._check_silence)
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
    """The corresponding HTTP error."""
    if error.code == frames.TOO_LARGE:
        return GatewayError(413, "request_too_large", f"{error.reason}.")
    return GatewayError(400, "websocket_protocol", f"{error.reason}.")
