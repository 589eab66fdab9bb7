"""Delivery of an answer from its first byte on: the replica's bytes go to the client as they arrive, and the usage is noted.

    stream ──► pump ──► complete                                      plain, read whole ──► one write
                 └──► breaks off ──► resumption.py, or an error event  any other ──► copied as it comes, cut if it breaks off

Complete events are never held, and no other task is involved: bytes are written to the client where they are read from the
replica. After the first byte an error can only be an event of the stream, in the form of its dialect. If the dialect has none,
or the client has an incomplete event, the connection is cut: further bytes would become a part of that event, or make it look
complete.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from gateway.accounting.consumed import BYTES_PER_TOKEN
from gateway.accounting.meter import Meter
from gateway.accounting.money import decimal
from gateway.admission.cors import answer_lines
from gateway.config.live import Live
from gateway.dialects.dialect import StreamReader
from gateway.errors import REPLICA_FAILED, ClientStalled, GatewayError, ReplicaFailure, shutting_down
from gateway.request.answer_assembly import AssembledReader, AssembledTail
from gateway.request.attempts import Attempts
from gateway.request.client import Audience, ClientReply
from gateway.request.exchange import Exchange
from gateway.request.forms import EVENT_STREAM
from gateway.request.inflated import InflationError
from gateway.request.notes import DELIVER
from gateway.request.phases.replies import STREAM_LINES, end_with_error, queue_line
from gateway.request.resumption import Resumption, SecondBegin, SentBytes, pump
from gateway.request.running import RunningRequests
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.headers import downstream_headers

_CACHE_CONTROL: Final = b"cache-control"
_MAX_ERROR: Final = 64 << 10  # bytes of a replica's error that becomes an event


class Delivery:
    """Delivers answers (see the module). audience: clients that may know the replica. clock: monotonic seconds."""

    def __init__(
        self,
        *,
        live: Live,
        attempts: Attempts,
        resumption: Resumption,
        meter: Meter,
        running: RunningRequests,
        audience: Audience,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._attempts = attempts
        self._resumption = resumption
        self._meter = meter
        self._running = running
        self._audience = audience
        self._clock = clock

    async def deliver(self, exchange: Exchange, answer: ReplicaAnswer) -> ClientReply:
        """Send the whole answer to the client; returns when it is complete, or cannot be completed."""
        chosen, attempts, delivered = exchange.booking.chosen, exchange.attempts, exchange.delivered
        if delivered.early and delivered.reply is not None:
            return await self._deliver_late(exchange, answer, delivered.reply)
        routed, open_ = b"", self._audience.sees_headers(exchange.request)
        if open_:
            replica, predicted = chosen.replica.encode("ascii"), (exchange.prefilled or chosen).matched_tokens
            routed = b"X-Warmroute-Replica: %b\r\nX-Warmroute-Cached-Tokens: %d\r\n" % (replica, predicted)
        headers = downstream_headers(answer.head, answer.address)
        if attempts.lines:
            headers = attempts.lines
        id_ = exchange.record.id.encode("ascii")
        headers = b"%bX-Request-Id: %b\r\n%b" % (headers, id_, routed)
        if exchange.dialect.id_header:
            headers += b"%b: %b\r\n" % (exchange.dialect.id_header, id_)
        if self._live.cors_origins:
            headers += answer_lines(self._live.cors_origins, exchange.request.headers.get("Origin"))
        if exchange.record.placement.queued_s:
            headers += queue_line(exchange.record)
        delivered.status = answer.status
        if exchange.notes is not None:
            exchange.notes.enter(DELIVER, self._clock())
        whole = bool(attempts.body) and attempts.tail is None
        size = len(attempts.body) if whole and exchange.tap is None else None  # a tap may wait
        reply = exchange.request.reply(keep_alive=not self._running.leaving, patience_s=self._live.patience_s, size=size)
        delivered.reply = reply
        if answer.content_type == EVENT_STREAM and not attempts.body:
            await self._stream(exchange, answer, reply, headers + exchange.head_lines + _stream_lines(answer))
        elif whole:
            body = await _whole_body(exchange, answer)
            if open_ and answer.status == 200 and exchange.api.metered:
                headers += self._cost(exchange)
            reply.begin(answer.status, headers + exchange.head_lines, length=len(body), first=body)
            delivered.last_byte = self._clock()
        else:
            await self._copy(exchange, answer, reply, headers + exchange.head_lines)
        return reply

    async def _deliver_late(self, exchange: Exchange, answer: ReplicaAnswer, reply: ClientReply) -> ClientReply:
        """`deliver` after a pulse has sent the head of a stream: another answer becomes one, an error becomes its event."""
        attempts, delivered = exchange.attempts, exchange.delivered
        delivered.status = answer.status
        if exchange.notes is not None:
            exchange.notes.enter(DELIVER, self._clock())
        if answer.status == 200 and answer.content_type == EVENT_STREAM and not attempts.body:
            await self._stream(exchange, answer, reply, None)
            return reply
        if answer.status >= 400:
            exchange.answered(answer)
            error = attempts.body or await _error_of(answer)
            end_with_error(exchange, reply, exchange.dialect.replica_error(answer.status, error))
            return reply
        if answer.status != 200 or attempts.tail is not None or not attempts.body:
            delivered.status = 0
            raise _no_stream()
        translated = attempts.lines == STREAM_LINES  # it is a stream already (`Attempts`)
        body = await _whole_body(exchange, answer)
        try:
            events = body if translated else exchange.dialect.streamed(exchange.api, body)
        except (TypeError, ValueError):  # TypeError: nested too deeply
            delivered.status = 0
            raise _no_stream() from None
        reply.end(events)
        delivered.last_byte = self._clock()
        return reply

    def _cost(self, exchange: Exchange) -> bytes:
        """Header lines with the cost of a plain answer."""
        used = exchange.consumed(exchange.usage, whole=True)
        bill = exchange.delivered.bill = self._meter.bill(exchange.api.model, used)
        if bill is None:
            return b""
        line = b"X-Warmroute-Cost-Usd: %b\r\n" % decimal(bill.total).encode("ascii")
        return line + b"X-Warmroute-Cost-Estimated: %b\r\n" % used.estimated.encode("ascii") if used.estimated else line

    async def _stream(self, exchange: Exchange, answer: ReplicaAnswer, reply: ClientReply, headers: bytes | None) -> None:
        """Send the events of a stream to the client as they arrive. headers: None: the head is sent."""
        delivered, api = exchange.delivered, exchange.api
        delivered.last_byte = delivered.sent_at = self._clock()
        kept, completed, error = None, False, None
        counted = delivered.awaits_token = api.metered and answer.status == 200
        if not counted:
            exchange.answered(answer)
        elif exchange.target.resume_streams:
            kept = SentBytes(exchange.request.lease)

        def reader_of() -> StreamReader:
            reader = exchange.answers.reader(api, watchful=kept is not None)
            return _client_reader(exchange, reader) if counted else reader

        try:
            reader = _second(exchange, reader_of())
            failure = await pump(exchange, answer, reader, kept, self._clock, headers=headers, needs_done=counted)
            if failure:
                reply.feed_from(None)
                answer.close()
                error = await self._elsewhere(exchange, reply, kept, failure, reader_of)
            completed = error is None
            if error:
                self._leave_pool(exchange, error)
                self._break_off(exchange, reply, error, events=True)
        except InflationError as ours:
            if not reply.begun or delivered.early:
                raise
            self._break_off(exchange, reply, ours, events=True)
        except ClientStalled:
            reply.cut()  # the bytes written already would keep the connection open
            raise
        except asyncio.CancelledError:
            if (ended := self._ended(exchange)) is None:
                raise  # the client left
            self._break_off(exchange, reply, ended, events=True)
        finally:
            reply.feed_from(None)
            if exchange.attempts.broken:
                self._attempts.judge_broken(exchange, completed=completed)

    async def _elsewhere(
        self,
        exchange: Exchange,
        reply: ClientReply,
        kept: SentBytes | None,
        failure: ReplicaFailure,
        reader_of: Callable[[], StreamReader],
    ) -> GatewayError | None:
        """Have another replica complete a stream that broke off. Returns the error for the client if that is not possible."""
        again = exchange.may_begin_again
        if (exchange.delivered.awaits_token and self._attempts.is_final(exchange, failure)) or not (again or kept is not None):
            return self._attempts.broke_off(exchange, failure)
        return await self._resumption.complete(exchange, reply, kept, failure, reader_of)

    def _leave_pool(self, exchange: Exchange, error: GatewayError) -> None:
        """Raises the error of a stream again if another pool gets its request."""
        if error.code == REPLICA_FAILED and self._attempts.leaves_pool(exchange):
            exchange.delivered.status, exchange.delivered.early = 0, True
            raise error.again()

    async def _copy(self, exchange: Exchange, answer: ReplicaAnswer, reply: ClientReply, headers: bytes) -> None:
        """Send any other answer as it arrives: the rest of a large plain answer to a generation, or the answer of another
        endpoint.
        """
        attempts, delivered, clock = exchange.attempts, exchange.delivered, self._clock
        tail = attempts.tail
        exchange.answered(answer)
        exchange.require_room()
        first, attempts.body = attempts.body or answer.take(), b""
        seen = [len(first)]  # a list, because compiled code would read a variable of this function before it is set
        if tail and exchange.assembly is not None:
            tail = AssembledTail(tail, exchange.assembly, first)

        def sink(data: bytes) -> None:
            reply.write(data)
            delivered.last_byte = clock()
            seen[0] += len(data)
            if tail:
                tail.feed(data)

        try:
            reply.begin(answer.status, headers, length=_length(answer, exchange.request.method), first=first)
            del first
            reply.feed_from(answer)
            await answer.pump(sink)
            reply.end()
            delivered.usage = tail.usage() if tail else None
        except ReplicaFailure as failure:
            error = self._attempts.broke_off(exchange, failure)
            if attempts.broken:
                self._attempts.judge_broken(exchange, completed=False)
            self._break_off(exchange, reply, error, events=False)
        except ClientStalled:
            reply.cut()
            raise
        except asyncio.CancelledError:
            if (ended := self._ended(exchange)) is None:
                raise  # the client left
            self._break_off(exchange, reply, ended, events=False)
        finally:
            reply.feed_from(None)
            if delivered.usage is None and tail:
                delivered.usage = tail.usage()  # some engines write it before the last part
            delivered.shown = tail is not None
            if not exchange.answer_counted:
                delivered.passed = seen[0] // BYTES_PER_TOKEN

    def _ended(self, exchange: Exchange) -> GatewayError | None:
        """The error of a cancelled answer. None: its client has left."""
        if exchange.ended_by is not None:
            return exchange.ended_by.again()
        return shutting_down() if self._running.over else None

    def _break_off(self, exchange: Exchange, reply: ClientReply, error: GatewayError, *, events: bool) -> None:
        """End an answer that cannot be completed: by an error event if the dialect has one, else by cutting the connection."""
        delivered = exchange.delivered
        if delivered.done_sent:
            reply.end()  # only the end of the framing is missing, and nothing may follow [DONE]
            return
        delivered.error, exchange.record.code = error.message, error.code
        reader = delivered.reader
        if reader and reader.reported:
            reply.end()  # the client has the engine's own error event
        elif events:
            seen = error if self._audience.is_operator(exchange.request) else error.redacted(exchange.record.id)
            end_with_error(exchange, reply, seen)
        else:
            reply.cut()


def _no_stream() -> GatewayError:
    """A replica's answer to a request for a stream is none, and the client has the head of one."""
    text = "The replica has answered a request for a stream with another answer, which has no form as a stream."
    return GatewayError(502, REPLICA_FAILED, text)


async def _error_of(answer: ReplicaAnswer) -> bytes:
    """The body of a replica's error, or its beginning."""
    with contextlib.suppress(ReplicaFailure):
        return await answer.begin(_MAX_ERROR)
    return answer.peek()


async def _whole_body(exchange: Exchange, answer: ReplicaAnswer) -> bytes:
    """The body of a plain answer that was read whole, as the client gets it. Raises GatewayError without room for it."""
    attempts, delivered = exchange.attempts, exchange.delivered
    exchange.answered(answer)
    exchange.require_room()
    body, attempts.body = attempts.body, b""
    delivered.usage = attempts.usage
    if answer.status == 200 and (editor := exchange.editor()):
        body, delivered.usage = editor.whole(body, delivered.usage)
    if (exchange.assembly or exchange.tap) and answer.status == 200:
        body = await _watched(exchange, body)
    if not exchange.answer_counted:
        delivered.passed = len(body) // BYTES_PER_TOKEN
    usage = exchange.usage
    delivered.shown = bool(usage and usage.completion) or _has_output(exchange, answer, body)
    return body


def _stream_lines(answer: ReplicaAnswer) -> bytes:
    """Header lines of a stream, beside the replica's. nginx in front must not hold chunks back."""
    given = any(name == _CACHE_CONTROL for name, _ in answer.head.headers)
    return b"X-Accel-Buffering: no\r\n" if given else b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


def _has_output(exchange: Exchange, answer: ReplicaAnswer, body: bytes) -> bool:
    """True if a plain answer to a generation has a text, a call or a thought."""
    assembler = exchange.dialect.assembler()
    if assembler is None or answer.status != 200 or not exchange.api.metered:
        return False
    assembler.read(body)
    read = assembler.answer()
    return read is not None and bool(read.parts)


async def _watched(exchange: Exchange, body: bytes) -> bytes:
    """Passes a whole plain answer through the assembly and the tap. Returns the body for the client."""
    if exchange.assembly:
        exchange.assembly.read(body)
    return await exchange.tap.whole(body) if exchange.tap else body


def _client_reader(exchange: Exchange, reader: StreamReader) -> StreamReader:
    """The reader with the gateway's additions to the engine's answer."""
    if editor := exchange.editor():
        reader = editor.reader(reader)
    if exchange.assembly is not None:
        reader = AssembledReader(reader, exchange.assembly)
    return exchange.tap.reader(reader) if exchange.tap else reader


def _second(exchange: Exchange, reader: StreamReader) -> StreamReader:
    """The reader; after the opening of another pool's stream, which broke off, without a second opening."""
    before = exchange.delivered.reader
    return SecondBegin(reader, exchange.dialect.is_opening) if before is not None and before.opened else reader


def _length(answer: ReplicaAnswer, method: str) -> int | None:
    """The length of the body for the client; None: unknown."""
    if method != "HEAD":
        return answer.head.length
    advertised = answer.head.get(b"content-length")
    return int(advertised) if advertised.isdigit() else None
