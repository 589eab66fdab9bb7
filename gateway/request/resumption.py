"""Streams a replica's events to the client, and resumes a stream that its replica broke off.

    pump ── complete ────────────────────────────────────────────────────────────────────────────────────────► good
     ▲ ├─── broken before its first token ──► another replica answers (`_begin_again`)
     ▲ └─── broken ── nothing but the end is missing ──► the gateway ends it ────────────────────────────────► good
     │        │ └──── more than a text, too long, no other replica ──► an error event ───────────────────────► impossible
     │        └────── another replica begins to stream the rest (attempts.py) ──┐ none does ──► an error event ► failed
     └──────────────────────────────────────────────────────────────────────────┘

If the pool's configuration wants it (`resume_streams`), the sent bytes are kept, and another replica continues the stream. The
rules are the same as for retries: the lease moves to the best replica left, each replica is tried once, each outcome counts for
its breaker, and the number of attempts is small, because the request itself may kill its engine.

Before its first token a stream needs no such configuration: the client has comments, pings, a role or `message_start`, and the
other replica's answer follows them.

A dead replica breaks off all its streams at once. So they are resumed one after the other (`SentEvents`), each in its own turn
of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.admission.memory import LARGE_BODY, MemoryLease
from gateway.config.live import Live
from gateway.dialects.dialect import Continuation, OuterReader, StreamReader, ended_without_done
from gateway.dialects.events.sse import events_of
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.errors import GatewayError, ReplicaFailure
from gateway.parser.parsing import Parsing
from gateway.request.answer_assembly import AssembledReader
from gateway.request.attempts import Attempts
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.telemetry.metrics import Metrics
from gateway.turns import TURN_S
from gateway.upstream.client import ReplicaAnswer

MAX_KEPT_BYTES: Final = 4 << 20  # of one stream; a longer one cannot be resumed
KEPT_STEP: Final = 1 << 16
READ_STEP: Final = 1 << 11  # bytes of it that are read at once: 1,024 of the smallest events


class SentBytes:
    """The bytes sent to a client, unless they exceed their maximum or the memory budget."""

    __slots__ = ("_charged", "_data", "_lease", "_most", "_too_many")

    def __init__(self, lease: MemoryLease | None = None, most: int = MAX_KEPT_BYTES) -> None:
        """lease: the request's, which is charged in steps of KEPT_STEP. most: maximum bytes."""
        self._most = most
        self._data = bytearray()  # one buffer, because bytes may come one by one
        self._lease = lease
        self._charged = 0
        self._too_many = False

    def add(self, data: bytes) -> None:
        if self._too_many:
            return
        size = len(self._data) + len(data)
        if (size > self._charged or size > self._most) and not self._charge(size):
            return
        self._data += data

    def whole(self) -> bytearray | None:
        """All bytes, without a copy. None: they exceeded the maximum."""
        return None if self._too_many else self._data

    def _charge(self, size: int) -> bool:
        step = size - self._charged + KEPT_STEP
        if size <= self._most and (self._lease is None or self._lease.grow(step)):
            self._charged += step
            return True
        self._too_many = True
        self._data = bytearray()
        if self._lease is not None:
            self._lease.shrink(self._charged)
        return False


class _EarlyEnd(Exception):
    """The rest of a stream is not needed."""


async def pump(
    exchange: Exchange,
    answer: ReplicaAnswer,
    reader: StreamReader,
    kept: SentBytes | None,
    clock: Callable[[], float],
    *,
    headers: bytes | None,
    needs_done: bool,
) -> ReplicaFailure | None:
    """Streams the events of one replica to the client and ends the reply. Returns the reason if the stream broke off.

    kept: collects the sent bytes, if the stream may be resumed. headers: of the reply; None: it has begun. needs_done: without
    [DONE] or a finish reason the stream is incomplete. Raises ConnectionError if the client has disconnected, or does not read.
    """
    delivered, reply = exchange.delivered, exchange.delivered.reply
    assert reply is not None
    delivered.reader = reader

    def sink(data: bytes) -> None:
        out = reader.feed(data)
        reply.write(out)
        delivered.passed_on(out, clock())
        if kept is not None or delivered.awaits_token:
            _gone(exchange, answer, reader, kept, out)
        if reader.enough:
            raise _EarlyEnd

    try:
        if headers is not None:
            _gone(exchange, answer, reader, kept, _begin(answer, reader, reply, headers))
        else:
            with contextlib.suppress(_EarlyEnd):
                sink(answer.take_turn())
        reply.feed_from(answer)
        await _pump_on(answer, reader, sink)
        last = reader.finish()  # before the check: some engines end with a [DONE] without a blank line after it
        _require_good_end(exchange, answer, reader, needs_done=needs_done)
        reply.end(last if not reader.holds else last + await _kept(exchange, reader))
    except ReplicaFailure as failure:
        if not reader.holds:
            return failure
        reply.end(await _kept(exchange, reader))  # the answer is complete
    finally:
        delivered.done_sent = reader.done and not reader.holds
        delivered.passed += reader.passed
        if reader.usage:  # also if the client disconnects just before the end
            delivered.usage, delivered.late = reader.usage, reader.late
    return None


def _await_token(exchange: Exchange, answer: ReplicaAnswer, reader: StreamReader) -> None:
    """Handles bytes of a stream without a token so far. Raises ReplicaFailure if the engine has reported its failure."""
    if reader.started:
        exchange.note_token(answer)
    else:
        answer.note_prefill(on=True)
        reader.raise_failure()


def _gone(exchange: Exchange, answer: ReplicaAnswer, reader: StreamReader, kept: SentBytes | None, out: bytes) -> None:
    """Handles bytes that were sent to the client. Raises ReplicaFailure if the engine has reported its failure."""
    if kept is not None:
        kept.add(out)
        reader.raise_failure()
    if exchange.delivered.awaits_token:
        _await_token(exchange, answer, reader)


async def _pump_on(answer: ReplicaAnswer, reader: StreamReader, sink: Callable[[bytes], None]) -> None:
    """Streams until the end of the answer, or until the rest is not needed."""
    if not reader.enough:
        with contextlib.suppress(_EarlyEnd):
            await answer.pump(sink)


def _begin(answer: ReplicaAnswer, reader: StreamReader, reply: ClientReply, headers: bytes) -> bytes:
    """Begins the reply with the first events; without them if they cannot be read, because an error event follows."""
    out = b""
    try:
        out = reader.feed(answer.take_turn())
    finally:
        reply.begin(answer.status, headers, length=None, first=out)
    return out


async def _kept(exchange: Exchange, reader: StreamReader) -> bytes:
    """Stores the answer; returns the end of the stream that was held until then."""
    assert exchange.tap
    return await exchange.tap.ended(reader)


def _require_good_end(exchange: Exchange, answer: ReplicaAnswer, reader: StreamReader, *, needs_done: bool) -> None:
    if exchange.delivered.awaits_token:
        _await_token(exchange, answer, reader)
    if reported := reader.reported:
        raise ReplicaFailure(reported.reason, reported.message)  # a new object: the old one refers to its frames
    if needs_done and not (reader.done or reader.finished):
        raise ended_without_done()


class SentEvents:
    """Reads the events that clients of broken streams have, one stream at a time, in order of arrival. clock: monotonic
    seconds.
    """

    __slots__ = ("_clock", "_lock")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()

    async def read(self, continuation: Continuation, kept: SentBytes) -> FinishedAnswer | None:
        """The answer so far, read in turns with other work. None: it is too large, or has more than one text."""
        contended = self._lock.locked()
        async with self._lock:
            if not contended:  # so that streams with little text also queue up, and have a turn each
                await asyncio.sleep(0)
            data = kept.whole()
            if data is None:
                return None
            assembler, due = continuation.partial(), self._clock() + TURN_S
            for at in range(0, len(data), READ_STEP):
                assembler.feed(bytes(data[at : at + READ_STEP]))
                if assembler.answer() is None:
                    break
                if self._clock() >= due:
                    await asyncio.sleep(0)
                    due = self._clock() + TURN_S
            assembler.finish()
            return assembler.answer()


class Copy:
    """Memory of the request with the text so far, beside the client's own: charged to the request's lease until it is sent."""

    __slots__ = ("_lease", "_size")

    def __init__(self, lease: MemoryLease) -> None:
        self._lease = lease
        self._size = 0

    def charge(self, size: int) -> bool:
        """Charge these bytes. False: there is no room. Small requests are not charged."""
        if size < LARGE_BODY:
            return True
        if not self._lease.grow(size):
            return False
        self._size += size
        return True

    def drop(self) -> None:
        """Release the memory. Idempotent."""
        size, self._size = self._size, 0
        self._lease.shrink(size)


class SecondBegin(OuterReader):
    """Reads a second stream for a client that has received the opening events of a first one. Removes the second stream's own
    opening events (a role, `message_start`, `response.created`).
    """

    def __init__(self, inner: StreamReader, is_opening: Callable[[bytes], bool]) -> None:
        super().__init__(inner)
        self.opened = True
        self._is_opening = is_opening

    def feed(self, chunk: bytes) -> bytes:
        return self._noted(self.inner.feed(chunk), over=self.started)

    def finish(self) -> bytes:
        return self._noted(self.inner.finish(), over=self.started)

    def _noted(self, out: bytes, *, over: bool) -> bytes:
        self.note()
        self.opened = True  # by the first stream
        self.within_event, self.holds = self.inner.within_event, self.inner.holds
        return out if over else b"".join(event for event in events_of(out) if not self._is_opening(event))


class Resumption:
    """Resumes broken streams (see the module). clock: monotonic seconds."""

    def __init__(
        self, *, live: Live, attempts: Attempts, parsing: Parsing, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._live = live
        self._attempts = attempts
        self._parsing = parsing
        self._metrics = metrics
        self._clock = clock
        self._sent = SentEvents(clock)

    async def complete(
        self,
        exchange: Exchange,
        reply: ClientReply,
        kept: SentBytes | None,
        failure: ReplicaFailure,
        reader_of: Callable[[], StreamReader],
    ) -> GatewayError | None:
        """Have other replicas complete a stream that broke off. reader_of: makes the reader of a stream. Returns the error for
        the client if that fails.
        """
        if kept is None:
            error: GatewayError | None = self._note(exchange, failure)
        else:
            error = await self._resume(exchange, reply, kept, failure)
        attempts = exchange.attempts
        if error is not None and exchange.may_begin_again and not attempts.resumptions:
            error = await self._begin_again(exchange, reply, error, reader_of)
        return error

    async def _resume(
        self, exchange: Exchange, reply: ClientReply, kept: SentBytes, failure: ReplicaFailure
    ) -> GatewayError | None:
        """Complete the answer after the bytes in `kept`. Returns the error for the client if that fails."""
        attempts, delivered = exchange.attempts, exchange.delivered
        error = self._note(exchange, failure)
        tried = len(attempts.failed)
        total_s = self._live.config.timeouts.total_s
        left_s = total_s - (self._clock() - attempts.since) if total_s else None
        error_for_client: GatewayError | None
        try:
            async with asyncio.timeout(left_s):
                error_for_client = await self._continue(exchange, reply, kept, error)
        except TimeoutError:
            error_for_client = error
            if delivered.done_sent:  # only the end of the framing is missing
                reply.end()
                error_for_client = None
        except GatewayError as ours:
            error_for_client = ours.with_traceback(None)  # the traceback refers to this frame
        attempted = attempts.resumptions or len(attempts.failed) > tried
        result = "good" if error_for_client is None else "failed" if attempted else "impossible"
        self._metrics.resumed.add((exchange.record.subject.label, result))
        return error_for_client

    async def _begin_again(
        self, exchange: Exchange, reply: ClientReply, error: GatewayError, reader_of: Callable[[], StreamReader]
    ) -> GatewayError | None:
        """Have another replica answer after a stream that broke off before its first token. error: for the client if that
        fails.
        """
        reader = exchange.delivered.reader
        opened = reader is not None and reader.opened
        while exchange.may_begin_again:
            try:
                answer = await self._attempts.rest_of_answer(exchange, exchange.api.body)
            except GatewayError as ours:
                return ours.with_traceback(None)  # the traceback refers to this frame
            if answer is None:
                break
            reader = SecondBegin(reader_of(), exchange.dialect.is_opening) if opened else reader_of()
            try:
                again = await pump(exchange, answer, reader, None, self._clock, headers=None, needs_done=True)
            finally:
                reply.feed_from(None)
                answer.close()
            if again is None:
                return None
            error, opened = self._note(exchange, again), opened or reader.opened
        return error

    async def _continue(
        self, exchange: Exchange, reply: ClientReply, kept: SentBytes, error: GatewayError
    ) -> GatewayError | None:
        """Continue at one replica after the other. error: for the client if all fail."""
        api, continuation = exchange.api, exchange.dialect.continuation
        if continuation is None:
            return error
        while True:
            so_far = await self._sent.read(continuation, kept)
            if so_far is None:
                return error
            copy = Copy(exchange.request.lease)
            opened = list[ReplicaAnswer]()  # at most one; compiled code would narrow an optional variable wrongly in `finally`
            try:
                rest = await self._rest(exchange, so_far, copy)
                if rest == b"":
                    self._end(exchange, reply, continuation, so_far)
                    return None
                answer = await self._attempts.rest_of_answer(exchange, rest) if rest else None
                if answer is None:
                    return error
                opened.append(answer)
                rest, so_far.parts = None, []  # sent, and not needed from here on
                answer.when_sent(copy.drop)
                exchange.delivered.resumed += 1
                exchange.delivered.awaits_token = True
                reader = continuation.reader(so_far, strip_usage=api.strip_usage)
                if exchange.assembly is not None:
                    reader = AssembledReader(reader, exchange.assembly)
                if exchange.tap is not None and exchange.tap.repeatable():
                    reader = exchange.tap.reader(reader)
                failure = await pump(exchange, answer, reader, kept, self._clock, headers=None, needs_done=True)
                if failure is None:
                    return None
                if reader.done:  # a failure after [DONE] does not count: the answer is complete
                    reply.end()
                    return None
                error = self._note(exchange, failure)
            finally:
                reply.feed_from(None)
                for each in opened:
                    each.close()
                copy.drop()

    async def _rest(self, exchange: Exchange, so_far: FinishedAnswer, copy: Copy) -> bytes | None:
        """The request for the rest. b"": only the end is missing; None: it cannot be requested, or there is no room for it."""
        if so_far.finish_reason or so_far.done:
            return b""
        api, text, client = exchange.api, so_far.text, exchange.request.lease.account.client
        if text and not copy.charge(len(api.body) + len(text)):
            return None
        return await self._parsing.continuation(exchange.dialect, api.body, so_far, client)

    def _note(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        """Record that the current replica broke the answer off. Returns the error for the client."""
        replica = exchange.booking.chosen.replica
        self._attempts.note(exchange, replica, failure.reason, f"broke off: {failure.message}")
        return self._attempts.broke_off(exchange, failure)

    def _end(self, exchange: Exchange, reply: ClientReply, continuation: Continuation, so_far: FinishedAnswer) -> None:
        """Send the end of the stream, which alone is missing."""
        delivered = exchange.delivered
        delivered.usage = delivered.usage or so_far.usage
        reply.end(continuation.ending(so_far, None if exchange.api.strip_usage else delivered.usage))
        delivered.last_byte = self._clock()
