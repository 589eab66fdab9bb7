"""One connection to a replica. Those that are idle wait in a pool (`pool.py`).

    connect ──► send ──► head ──► body ──► complete ──► idle ──► send ...
                  └─────────────────────────┴──► failed: the connection is closed, nobody uses it again

A connection is an asyncio protocol that carries one call at a time. What comes in goes through `http1.Answer` and on at once:
into a sink, called from within the event loop's read, or into a buffer until there is one. Nothing is scheduled for a chunk,
and no task wakes up for it, but for what is too much for one turn of the event loop (`turns.py`). A connection is used again
only if its answer ended exactly where its framing says, with not a byte behind it and not a byte of the request unsent, and if
nothing has come since: a second answer is not the next call's.

Silence is measured by one timer a call, which looks at the time of the last byte when it fires: at least once in `idle_s`, so
that it is never late. Before the body nothing is a sign of life, or a head sent byte by byte would hold a request for ever.

What is held back is held back in the kernel, also of TLS: a paused TLS transport of uvloop loses what it has read when the
connection ends, so it is never paused, but the TCP transport beneath it.
"""

from __future__ import annotations

import asyncio
import math
import select
import ssl
from collections.abc import Callable
from typing import Final, cast

from gateway.errors import ClientStalled, ReplicaFailure
from gateway.turns import AT_ONCE, LARGE, Late, first_turn, turns_of
from gateway.upstream.held_back import Held
from gateway.upstream.http1 import Answer, FramingError
from gateway.upstream.sending import Sending
from gateway.upstream.timeouts import Limits

MAX_UNREAD: Final = 1 << 18  # bytes of an answer that nobody has asked for yet; beyond this the connection is not read

Sink = Callable[[bytes], None]


class Connection(asyncio.Protocol):
    """See the top of this file. One owner at a time calls `send`, then `wait`, then `take` or `pump`."""

    __slots__ = (
        "_active",
        "_begun",
        "_ended",
        "_flow",
        "_flowing",
        "_held",
        "_late",
        "_limits",
        "_loop",
        "_parts",
        "_paused_by",
        "_poll",
        "_sending",
        "_sink",
        "_stopped",
        "_timer",
        "_transport",
        "_waiter",
        "answer",
        "failure",
        "idle_since",
        "lost",
        "started",
        "unread",
        "used",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._flow: asyncio.Transport | None = None  # TCP's, which is paused and resumed; without TLS the same
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self.unread = 0  # bytes of the body that are here and were not taken: the length of all _parts
        self._sending = Sending(loop)
        self._paused_by = 0  # by whom reading is held back: a sum of _OWNER, _UNREAD and _LATE
        self._stopped = False  # _flow is paused
        self._held = Held()  # by the owner
        self._late = Late(turns_of(loop))
        self._ended: Exception | None = None  # why the connection was lost; EOFError: for no reason
        self._poll: select.poll | None = None
        self._limits = Limits(0, 0, 0)
        self._active = self._begun = self.idle_since = 0.0
        self.answer: Answer | None = None
        self._flowing = False  # the body's first byte is here
        self.failure: Exception | None = None  # a ReplicaFailure, a ClientStalled, or what the sink raised
        self.started = False  # the replica has said anything to this call
        self.used = 0  # calls that it carried before this one
        self.lost: Callable[[Connection], None] | None = None  # to be called when it ends; set while it is idle

    # -- the owner's side

    async def secure(self, tls: ssl.SSLContext, name: str) -> None:
        """Speak TLS from now on, before the first call. name: of the server. Raises OSError."""
        if self._flow is None or self._flow.is_closing():
            raise ConnectionResetError("it ended before its TLS handshake")
        try:
            transport = await self._loop.start_tls(self._flow, self, tls, server_hostname=name)
        except BaseException:
            self.abort()
            raise
        if self._transport is None or transport is None:
            raise ConnectionResetError("it ended with its TLS handshake")
        self._transport = self._sending.transport = transport

    def send(self, head: bytes, body: bytes = b"", *, to_head: bool, limits: Limits) -> None:
        """Begin a call: a whole request. A large body is not copied. Raises ReplicaFailure if the connection has ended."""
        if self._transport is None:
            raise ReplicaFailure("reset", "the connection ended before the request was sent", reached=0)
        self.answer, self.failure, self.started = Answer(to_head=to_head), None, False
        self._limits, self._flowing = limits, False
        self._held.clear()
        self._active = self._begun = now = self._loop.time()
        soonest = now + min(limits.first_byte_s, limits.idle_s, limits.total_s or math.inf)
        if self._timer is None or self._timer.when() > soonest:  # one that fires too early sees that it does
            self._look_at_time()
        self._sending.write(head, body)

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call it when nothing of the request is in memory here any more: mostly at once, but a replica may answer early."""
        self._sending.when_sent(call)

    @property
    def complete(self) -> bool:
        return self.answer is not None and self.answer.complete

    async def wait(self, beyond: int = 0) -> None:
        """Until there are more unread bytes than that, or the answer is complete. Raises ReplicaFailure."""
        while not (self.unread > beyond or self.complete or self.failure):
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.failure and self.unread <= beyond:
            raise self.failure

    def peek(self, start: int = 0) -> bytes:
        """What of the body is here, from this byte on; it stays here. O(its length) if `start` is where parts meet."""
        parts, missing = self._parts, self.unread - start
        if start == 0:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        at = len(parts)
        while missing > 0:
            at -= 1
            missing -= len(parts[at])
        return b"".join(parts[at:])[-missing:]

    def take(self) -> bytes:
        """What of the body is here."""
        parts, self._parts, self.unread = self._parts, [], 0
        self._hold(_UNREAD, on=False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def take_turn(self) -> bytes:
        """What of the body is here, or as much of it as should be read in one turn of the event loop: the rest stays here."""
        data = self.peek()
        size = first_turn(data)
        if size == len(data):
            return self.take()
        self._parts, self.unread = [data[size:]], len(data) - size
        if self.unread <= MAX_UNREAD:
            self._hold(_UNREAD, on=False)
        return data[:size]

    def still_prefill(self) -> None:
        """The bytes of the body so far are not the answer (keep-alive comments): `first_byte_s` goes on counting."""
        if self._flowing:
            self._flowing = False
            self._look_at_time()

    async def pump(self, sink: Sink) -> None:
        """Give the rest of the body to `sink` as it comes. Raises ReplicaFailure, ClientStalled, or what `sink` raises."""
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
        """Whoever takes the bytes cannot keep up."""
        self._held.turn(self._loop.time(), on=True)
        self._hold(_OWNER, on=True)

    def resume(self) -> None:
        self._active = now = self._loop.time()  # until now it was not the replica that was silent
        self._held.turn(now, on=False)
        self._hold(_OWNER, on=False)

    def release(self) -> bool:
        """The call is over for its owner. True if the connection can carry another; else it is closed."""
        transport, answer = self._transport, self.answer
        sent = self._sending.end()
        self.answer = self._sink = None
        self.failure = None  # once it is raised, it refers to all that was called, and so to this connection
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
        self._hold(_OWNER | _UNREAD, on=False)
        self.used += 1
        self.idle_since = self._loop.time()
        return True

    def abort(self) -> None:
        """Close at once: how an engine learns that nobody waits for its answer any more."""
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
        """When the last byte of the present answer came, by the loop's clock; -inf while there is none."""
        return self._active if self.started else -math.inf

    @property
    def quiet(self) -> bool:
        """Whether nothing waits in the kernel to be read: neither the connection's end nor bytes that nobody asked for."""
        assert self._transport is not None
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not self._poll.poll(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._flow = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._sending.transport = self._sending.flow = self._transport

    def data_received(self, data: bytes) -> None:
        if self._paused_by:
            self._late.add(data)
            self._hold(_LATE, on=True)
            return
        if len(data) > AT_ONCE:
            now = self._late.first(data)
            if self._late.size or len(data) > LARGE:
                self._hold(_LATE, on=True)
            data = now
        if data:
            self._read(data)

    def _next_turn(self) -> None:
        """Read what is late, as long as nothing else holds it back; then what comes."""
        self._late.due()
        if self._paused_by == _LATE:
            for part in self._late.turn():
                self._read(part)
                if self._paused_by != _LATE:
                    break
            self._hold(_LATE, on=self._late.size > 0)

    def _read(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or answer.complete:
            self.abort()  # nobody asked
            return
        self._active = self._loop.time()
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
                except Exception as raised:  # noqa: BLE001  (the owner's fault: `pump` raises it there)
                    self._fail(raised)
                    return
            else:
                self._parts.append(body)
                self.unread += len(body)
                if self.unread > MAX_UNREAD:
                    self._hold(_UNREAD, on=True)
        if answer.complete or (body and not self._sink):
            self._wake()

    def pause_writing(self) -> None:
        self._sending.pause()

    def resume_writing(self) -> None:
        self._sending.resume()

    def eof_received(self) -> None:
        """No half-open connections: a replica that stops sending is gone. asyncio closes the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._flow = self._sending.transport = self._sending.flow = None
        self._sending.drop()
        self._ended = exc or EOFError()
        if self.lost:
            self.lost(self)
        if not self._late.size:  # else what is late comes first: `_hold`
            self._end(self._ended)

    def _end(self, exc: Exception) -> None:
        """The connection is lost, and all that came was read."""
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
            held = self._held.lately(self._loop.time())
            text = f"{error}, after its client had not read for a while" if held else str(error)
            self._fail(ReplicaFailure("reset", text, blameless=held))
        else:
            self._wake()

    def _look_at_time(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.answer is None or self.complete:
            return  # the next call sets it again
        limits, now = self._limits, self._loop.time()
        silence, since = (limits.idle_s, self._active) if self._flowing else (limits.first_byte_s, self._begun)
        end = math.inf if limits.total_s is None else self._begun + limits.total_s
        due = min(since + silence, end)
        if now < due:
            self._timer = self._loop.call_at(min(due, now + limits.idle_s), self._look_at_time)
        elif limits.total_s is not None and now >= end:
            text = f"the answer took longer than {limits.total_s:g} s"
            if self._paused_by & _OWNER and self._held.lately(now):
                self._fail(ClientStalled(f"{text}, and the client has not read for a while"))
            else:
                self._fail(ReplicaFailure("timeout", text, blameless=True))
        elif self._paused_by & _OWNER:
            self._fail(ClientStalled(f"the client has not read for {silence:g} s"))
        else:
            self._fail(ReplicaFailure("timeout", f"nothing came for {silence:g} s"))

    def _fail(self, failure: Exception) -> None:
        self.failure = failure
        self._wake()
        self.abort()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _hold(self, who: int, *, on: bool) -> None:
        self._paused_by = self._paused_by | who if on else self._paused_by & ~who
        stop = self._paused_by != 0
        if stop != self._stopped and self._flow and not self._flow.is_closing():
            self._stopped = stop
            if stop:
                self._flow.pause_reading()
            else:
                self._flow.resume_reading()
        if self._paused_by == _LATE:
            self._late.schedule(self._next_turn)
        if self._ended and not self._late.size:
            self._end(self._ended)

    def __repr__(self) -> str:
        return f"<Connection {'up' if self.alive else 'down'}, used {self.used} times, {self.answer!r}>"


_OWNER: Final = 1
_UNREAD: Final = 2
_LATE: Final = 4
