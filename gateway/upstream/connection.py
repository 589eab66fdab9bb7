"""One connection to a replica; idle ones are kept in a pool (`pool.py`).

    connect ──► send ──► head ──► body ──► complete ──► idle ──► send ...
                  └─────────────────────────┴──► failed: closed, never reused

A connection is an asyncio protocol that carries one call at a time. Received bytes go through `http1.Answer` directly into a
sink, called within the event loop's read, or into a buffer until there is a sink. A chunk schedules nothing and wakes no task,
except for data beyond one turn of the event loop (`turns.py`). A connection is reused only if its answer ended
exactly where its framing says, without a byte after it and without an unsent byte of the request, and if nothing was received
since: a second answer must not be taken for the next call's.

Timeouts: one timer per call, which compares the time of the last byte when it fires, at least once per `idle_s`. Every byte of
the body is a sign of life. Until the body begins, received bytes do not reset it: a head sent byte by byte would hold a request
for ever. Silence is limited by `first_byte_s` up to the first token, then by `idle_s`.

Back-pressure stays in the kernel, also with TLS: a paused TLS transport of uvloop loses data that it has read when the
connection ends, so the TCP transport beneath it is paused instead.
"""

from __future__ import annotations

import asyncio
import math
import select
import ssl
from collections.abc import Callable
from typing import Final, cast

from gateway.errors import ClientStalled, ReplicaFailure
from gateway.turns import AT_ONCE, LARGE, DeferredData, first_turn, turns_of
from gateway.upstream.backpressure import Backpressure
from gateway.upstream.http1 import SWITCHING, AnswerParser, FramingError
from gateway.upstream.sending import RequestWriter
from gateway.upstream.timeouts import FIRST_BYTE, IDLE, TOTAL, UpstreamTimeouts

MAX_UNREAD: Final = 1 << 18  # buffered bytes of an answer beyond which reading is paused

Sink = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """See the top of this file. Its owner calls `send`, then `wait`, then `take` or `pump`."""

    __slots__ = (
        "_backpressure",
        "_ended",
        "_flowing",
        "_last_read",
        "_late",
        "_limits",
        "_loop",
        "_parts",
        "_paused_by",
        "_poll",
        "_prefill",
        "_sending",
        "_sent_at",
        "_sink",
        "_stopped",
        "_tcp",
        "_timer",
        "_transport",
        "_waiter",
        "answer",
        "failure",
        "generation",
        "idle_since",
        "lost",
        "on_hold",
        "started",
        "unread",
        "used",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._tcp: asyncio.Transport | None = None  # the TCP transport, which is paused and resumed; without TLS the same
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self.unread = 0  # buffered bytes of the body: the length of all _parts
        self._sending = RequestWriter(loop)
        self._paused_by = 0  # reasons why reading is paused: a sum of _OWNER, _UNREAD and _LATE
        self._stopped = False  # _tcp is paused
        self._backpressure = Backpressure()  # from pauses by the owner
        self._late = DeferredData(turns_of(loop))
        self._ended: Exception | None = None  # reason why the connection was lost; EOFError: closed by the replica
        self._poll: select.poll | None = None
        self._limits = UpstreamTimeouts(0, 0, 0)
        self._last_read = self._sent_at = self.idle_since = 0.0
        self.answer: AnswerParser | None = None
        self._flowing = False  # the body has begun
        self._prefill = False  # its bytes so far are no token
        self.failure: Exception | None = None  # a ReplicaFailure, a ClientStalled, or an exception of the sink
        self.started = False  # any byte of the answer was received
        self.used = 0  # earlier calls
        self.generation = 0  # of its pool, at its creation
        self.on_hold: Callable[[bool], None] | None = (
            None  # called with True when the replica stops reading the forwarded bytes, with False when it continues
        )
        self.lost: Callable[[Connection], None] | None = None  # called when the connection ends; set while it is idle

    # -- the owner's side

    async def secure(self, tls: ssl.SSLContext, name: str) -> None:
        """Start TLS, before the first call. name: of the server. Raises OSError."""
        if self._tcp is None or self._tcp.is_closing():
            raise ConnectionResetError("it ended before its TLS handshake")
        try:
            transport = await self._loop.start_tls(self._tcp, self, tls, server_hostname=name)
        except BaseException:
            self.abort()
            raise
        if self._transport is None or transport is None:
            raise ConnectionResetError("it ended with its TLS handshake")
        self._transport = self._sending.transport = transport

    def send(self, head: bytes, body: bytes = b"", *, to_head: bool, limits: UpstreamTimeouts, upgrades: bool = False) -> None:
        """Begin a call with a whole request; a large body is not copied. upgrades: it asks for another protocol.

        Raises ReplicaFailure if the connection has ended.
        """
        if self._transport is None:
            raise ReplicaFailure("reset", "the connection ended before the request was sent", reached=0)
        self.answer, self.failure, self.started = AnswerParser(to_head=to_head, upgrades=upgrades), None, False
        self._limits, self._flowing, self._prefill = limits, False, False
        self._backpressure.clear()
        self._last_read = self._sent_at = now = self._loop.time()
        if self._timer is None or self._timer.when() > now + limits.soonest_s:  # a timer that fires too early is set again
            self._check_timeouts()
        self._sending.write(head, body)

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once no part of the request is buffered here: mostly at once, but a replica may answer early."""
        self._sending.when_sent(callback)

    @property
    def complete(self) -> bool:
        return self.answer is not None and self.answer.complete

    @property
    def awaits_answer(self) -> bool:
        """True if a call was sent, and neither a byte of its answer's body nor its end was received."""
        return self.answer is not None and self.alive and not (self._flowing or self.complete or self.failure)

    @property
    def awaits_token(self) -> bool:
        """True if nothing of the answer's output has come: neither a token of a stream, nor the body of another answer."""
        return self.awaits_answer or (self._prefill and self.alive and not (self.complete or self.failure))

    @property
    def held_back(self) -> bool:
        """True if it is not read, because the owner's client does not keep up."""
        return self._paused_by & _OWNER != 0

    def give_up(self, failure: ReplicaFailure) -> None:
        """End a call that awaits its answer or its first token; its owner gets the failure."""
        if self.awaits_token:
            self._fail(failure)

    @property
    def switched(self) -> bool:
        """True if the replica has agreed to another protocol."""
        return self.answer is not None and self.answer.head is not None and self.answer.head.status == SWITCHING

    def forward(self, data: bytes) -> None:
        """Send the client's bytes, after a switch. They are signs of life, as the replica's are."""
        if self._transport and not self._transport.is_closing():
            self._last_read = self._loop.time()
            self._transport.write(data)

    @property
    def unsent(self) -> int:
        """Number of written bytes that were not sent yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def idle_s(self) -> float:
        """The time limit for silence of the current call."""
        return self._limits.idle_s

    async def wait(self, beyond: int = 0) -> None:
        """Wait for more than `beyond` unread bytes, the end of the answer, or a switch. Raises ReplicaFailure."""
        while not (self.unread > beyond or self.complete or self.failure or self.switched):
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.failure and self.unread <= beyond:
            raise self.failure

    def peek(self, start: int = 0) -> bytes:
        """The buffered body from offset `start` on, without taking it. O(its length) if `start` is a boundary of parts."""
        parts, missing = self._parts, self.unread - start
        if start == 0:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        at = len(parts)
        while missing > 0:
            at -= 1
            missing -= len(parts[at])
        return b"".join(parts[at:])[-missing:]

    def take(self) -> bytes:
        """Take the buffered body."""
        parts, self._parts, self.unread = self._parts, [], 0
        self._set_paused(_UNREAD, on=False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take_turn(self) -> bytes:
        """`take`, at most the share of one turn of the event loop."""
        data = self.peek()
        size = first_turn(data)
        if size == len(data):
            return self.take()
        self._parts, self.unread = [data[size:]], len(data) - size
        if self.unread <= MAX_UNREAD:
            self._set_paused(_UNREAD, on=False)
        return data[:size]

    def note_prefill(self, *, on: bool) -> None:
        """The bytes of the body so far are no token (keep-alives, a role, progress): `first_byte_s` limits silence, else
        `idle_s`.
        """
        self._prefill = on

    async def pump(self, sink: Sink) -> None:
        """Stream the rest of the body to `sink`. Raises ReplicaFailure, ClientStalled, and exceptions of `sink`."""
        while self._parts:
            sink(self.take_turn())
            if self._parts:
                await asyncio.sleep(0)
        self._sink = sink
        while not (self.complete or self.failure):
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.failure:
            raise self.failure

    def pause(self) -> None:
        """Stop reading: the owner's client does not keep up."""
        self._backpressure.set(self._loop.time(), on=True)
        self._set_paused(_OWNER, on=True)

    def resume(self) -> None:
        self._last_read = now = self._loop.time()  # the silence was the gateway's pause, not the replica's
        self._backpressure.set(now, on=False)
        self._set_paused(_OWNER, on=False)

    def release(self) -> bool:
        """End of the owner's call. True if the connection can carry another; else it is closed."""
        transport, answer = self._transport, self.answer
        sent = self._sending.end()
        self.answer = self._sink = self.on_hold = None
        self.failure = None  # its traceback refers to this connection
        self._parts, self.unread = [], 0
        good = (
            sent
            and answer is not None
            and answer.complete
            and answer.head is not None
            and answer.head.keep_alive
            and not answer.rest
            and not self._late.size
            and transport is not None
            and not transport.is_closing()
        )
        if not good:
            self.abort()
            return False
        self._set_paused(_OWNER | _UNREAD, on=False)
        self.used += 1
        self.idle_since = self._loop.time()
        return True

    def abort(self) -> None:
        """Close at once; an engine then aborts the request."""
        self._sending.drop()
        self._late.clear()
        if self._transport:
            self._transport.abort()
        elif self._timer:
            self._timer.cancel()
            self._timer = None

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def answered_at(self) -> float:
        """Loop time of the last byte of the current answer; -inf without one."""
        return self._last_read if self.started else -math.inf

    @property
    def quiet(self) -> bool:
        """True if the kernel has nothing to read: neither the connection's end nor unsolicited bytes."""
        assert self._transport is not None
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not self._poll.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._tcp = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._sending.transport = self._sending.tcp = self._transport

    def data_received(self, data: bytes) -> None:
        if self._paused_by:
            self._late.add(data)
            self._set_paused(_LATE, on=True)
            return
        if len(data) > AT_ONCE:
            now = self._late.first(data)
            if self._late.size or len(data) > LARGE:
                self._set_paused(_LATE, on=True)
            data = now
        if data:
            self._read(data)

    def _read_late(self) -> None:
        """Parse deferred data, unless paused for another reason; then resume reading."""
        self._late.due()
        if self._paused_by == _LATE:
            for part in self._late.turn():
                self._read(part)
                if self._paused_by != _LATE:
                    break
            self._set_paused(_LATE, on=self._late.size > 0)

    def _read(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or answer.complete:
            self.abort()  # unsolicited bytes
            return
        self._last_read = self._loop.time()
        self.started = True
        try:
            body = answer.feed(data)
        except FramingError as error:
            self._fail(ReplicaFailure("garbage", str(error)))
            return
        if body:
            self._flowing = True
            if self._sink:
                try:
                    self._sink(body)
                except Exception as raised:  # noqa: BLE001  (a bug of the owner: `pump` raises it)
                    self._fail(raised)
                    return
            else:
                self._parts.append(body)
                self.unread += len(body)
                if self.unread > MAX_UNREAD:
                    self._set_paused(_UNREAD, on=True)
        elif not self._flowing and self.switched:  # a switch without bytes behind its head
            self._flowing = True
            self._wake()
        if answer.complete or (body and not self._sink):
            self._wake()

    @property
    def since_sent_s(self) -> float:
        """Seconds since the last call was sent."""
        return self._loop.time() - self._sent_at

    def pause_writing(self) -> None:
        self._sending.pause()
        if self.on_hold:
            self.on_hold(True)

    def resume_writing(self) -> None:
        self._sending.resume()
        if self.on_hold:
            self.on_hold(False)

    def eof_received(self) -> None:
        """No half-open connections: asyncio closes the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._tcp = self._sending.transport = self._sending.tcp = None
        self._sending.drop()
        self._ended = exc or EOFError()
        if self.lost:
            self.lost(self)
        if not self._late.size:  # else `_set_paused` does it after the deferred data
            self._end(self._ended)

    def _end(self, exc: Exception) -> None:
        """The connection is lost, and all received data was parsed."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.answer is None or self.answer.complete or self.failure:
            return
        try:
            if not isinstance(exc, EOFError):
                raise FramingError(str(exc) or type(exc).__name__)
            self.answer.end()
        except FramingError as error:
            held = self._backpressure.recent(self._loop.time())
            text = f"{error}, after its client had not read for a while" if held else str(error)
            self._fail(ReplicaFailure("reset", text, blameless=held))
        else:
            self._wake()

    def _check_timeouts(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.answer is None or self.complete:
            return  # the next call starts the timer again
        limits, now = self._limits, self._loop.time()
        prefill = (self._prefill and not self._paused_by & _OWNER) or not self._flowing
        silence, since = limits.first_byte_s if prefill else limits.idle_s, self._last_read if self._flowing else self._sent_at
        end = self._sent_at + limits.left_s
        due = min(since + silence, end)
        if now < due:
            self._timer = self._loop.call_at(min(due, now + limits.idle_s), self._check_timeouts)
        elif limits.total_s is not None and now >= end:
            text = f"the answer took longer than {limits.total_s:g} s"
            if self._paused_by & _OWNER and self._backpressure.recent(now):
                self._fail(ClientStalled(f"{text}, and the client has not read for a while"))
            else:
                self._fail(_late(text, TOTAL, limits, blameless=True))
        elif self._paused_by & _OWNER:
            self._fail(ClientStalled(f"the client has not read for {silence:g} s"))
        else:
            text = f"nothing came for {silence:g} s"
            self._fail(_late(text, FIRST_BYTE if prefill else IDLE, limits, blameless=self.switched))

    def _fail(self, failure: Exception) -> None:
        self.failure = failure
        self._wake()
        self.abort()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_paused(self, reason: int, *, on: bool) -> None:
        self._paused_by = self._paused_by | reason if on else self._paused_by & ~reason
        stop = self._paused_by != 0
        if stop != self._stopped and self._tcp and not self._tcp.is_closing():
            self._stopped = stop
            if stop:
                self._tcp.pause_reading()
            else:
                self._tcp.resume_reading()
        if self._paused_by == _LATE:
            self._late.schedule(self._read_late)
        if self._ended and not self._late.size:
            self._end(self._ended)

    def __repr__(self) -> str:
        return f"<Connection {'up' if self.alive else 'down'}, used {self.used} times, {self.answer!r}>"


def _late(text: str, key: str, limits: UpstreamTimeouts, *, blameless: bool) -> ReplicaFailure:
    if not limits.named:
        return ReplicaFailure("timeout", text, blameless=blameless)
    return ReplicaFailure("timeout", f"{text} ({key})", blameless=blameless, limit=key)


_OWNER: Final = 1
_UNREAD: Final = 2
_LATE: Final = 4
