"""From the first byte on: a replica's answer goes to the client as it comes, and its usage is noted.

    stream ──► pump ──► complete                                      plain, read whole ──► one write
                 └──► breaks off ──► resumption.py, or an error event  any other ──► copied as it comes, cut if it breaks off

No finished event is held back any more, and nothing waits for a task: what goes on is written where the replica's bytes are
read. After the first byte an error can only be an event of the stream, in the form of its dialect. Where the dialect has none,
or the client has the head of an event and not its end, the connection is cut: what followed would be a part of that event, or
make it look whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.accounting.consumed import BYTES_PER_TOKEN
from gateway.accounting.meter import Meter
from gateway.accounting.money import decimal
from gateway.admission.cors import answer_lines
from gateway.config.live import Live
from gateway.dialects.dialect import StreamReader
from gateway.errors import ClientStalled, GatewayError, ReplicaFailure, shutting_down
from gateway.request.attempts import Attempts
from gateway.request.client import Audience, ClientReply
from gateway.request.exchange import Exchange
from gateway.request.forms import EVENT_STREAM
from gateway.request.notes import DELIVER
from gateway.request.resumption import Resumption, SentBytes, pump
from gateway.request.running import Running
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.headers import downstream_headers

_CACHE_CONTROL: Final = b"cache-control"
_PLAIN: Final = b"Content-Type: application/json\r\n"  # of an answer that was collected: its own head is that of a stream


class Delivery:
    """See the top of this file. audience: which clients may know the replica. clock: monotonic seconds."""

    def __init__(
        self,
        *,
        live: Live,
        attempts: Attempts,
        resumption: Resumption,
        meter: Meter,
        running: Running,
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
        """The whole answer to the client; returns when it is complete, or cannot be."""
        chosen, attempts, delivered = exchange.booking.chosen, exchange.attempts, exchange.delivered
        routed, open_ = b"", self._audience.sees_headers(exchange.request)
        if open_:
            replica = chosen.replica.encode("ascii")
            routed = b"X-Warmroute-Replica: %b\r\nX-Warmroute-Cached-Tokens: %d\r\n" % (replica, chosen.matched_tokens)
        headers = downstream_headers(answer.head, answer.address)
        if exchange.answers.collects and attempts.body and answer.status == 200:
            headers = _PLAIN
        id_ = exchange.record.id.encode("ascii")
        headers = b"%bX-Request-Id: %b\r\n%b" % (headers, id_, routed)
        if exchange.dialect.id_header:
            headers += b"%b: %b\r\n" % (exchange.dialect.id_header, id_)
        if self._live.cors_origins:
            headers += answer_lines(self._live.cors_origins, exchange.request.headers.get("Origin"))
        delivered.status = answer.status
        if exchange.notes is not None:
            exchange.notes.enter(DELIVER, self._clock())
        patience_s = self._live.patience_s
        reply = exchange.request.reply(keep_alive=not self._running.leaving, patience_s=patience_s)
        delivered.reply = reply
        if answer.content_type == EVENT_STREAM and not attempts.body:
            await self._stream(exchange, answer, reply, headers)
        elif attempts.body and attempts.tail is None:
            exchange.require_room()
            body, attempts.body = attempts.body, b""
            if exchange.tap and answer.status == 200:
                body = await exchange.tap.whole(body)
            delivered.usage = attempts.usage
            if answer.status == 200 and (editor := exchange.editor()):
                body, delivered.usage = editor.whole(body, delivered.usage)
            if delivered.usage is None:
                delivered.passed = len(body) // BYTES_PER_TOKEN
            if open_ and answer.status == 200 and exchange.api.metered:
                headers += self._cost(exchange)
            reply.begin(answer.status, headers, length=len(body), first=body)
            delivered.last_byte = self._clock()
        else:
            await self._copy(exchange, answer, reply, headers)
        return reply

    def _cost(self, exchange: Exchange) -> bytes:
        """Header lines of a plain answer: what it costs."""
        used = exchange.consumed(exchange.usage, whole=True)
        bill = exchange.delivered.bill = self._meter.bill(exchange.api.model, used)
        if bill is None:
            return b""
        line = b"X-Warmroute-Cost-Usd: %b\r\n" % decimal(bill.total).encode("ascii")
        return line + b"X-Warmroute-Cost-Estimated: %b\r\n" % used.estimated.encode("ascii") if used.estimated else line

    async def _stream(self, exchange: Exchange, answer: ReplicaAnswer, reply: ClientReply, headers: bytes) -> None:
        """The events to the client as they come."""
        delivered, api = exchange.delivered, exchange.api
        if not any(name == _CACHE_CONTROL for name, _ in answer.head.headers):
            headers += b"Cache-Control: no-cache\r\n"
        headers += b"X-Accel-Buffering: no\r\n"  # nginx in front must not hold chunks back
        delivered.last_byte = self._clock()
        kept, completed = None, False
        counted = api.metered and answer.status == 200
        if counted:
            delivered.first_byte = delivered.last_byte
            if api.countable or not api.size:  # the first token of a batch shows that its first prompt is computed, no more
                exchange.booking.first_token(delivered.last_byte)
            kept = SentBytes(exchange.request.lease) if exchange.target.resume_streams else None
        reader = exchange.answers.reader(api, watchful=kept is not None)
        if counted:
            reader = _told(exchange, reader)
        try:
            failure = await pump(exchange, answer, reader, kept, self._clock, headers=headers, needs_done=counted)
            if failure and kept:
                reply.feed_from(None)
                answer.close()
                error = await self._resumption.resume(exchange, reply, kept, failure)
            else:
                error = self._attempts.broke_off(exchange, failure) if failure else None
            completed = error is None
            if error:
                self._break_off(exchange, reply, error, events=True)
        except ClientStalled:
            reply.cut()  # what is written already would keep the connection open
            raise
        except asyncio.CancelledError:
            if not self._running.over:
                raise  # the client left
            self._break_off(exchange, reply, shutting_down(), events=True)
        finally:
            reply.feed_from(None)
            if exchange.attempts.broken:
                self._attempts.judge_broken(exchange, completed=completed)

    async def _copy(self, exchange: Exchange, answer: ReplicaAnswer, reply: ClientReply, headers: bytes) -> None:
        """Any other answer as it comes: a large plain one of a generation, whose beginning was read, or one of another
        endpoint.
        """
        attempts, delivered, clock = exchange.attempts, exchange.delivered, self._clock
        tail = attempts.tail
        exchange.require_room()
        first, attempts.body = attempts.body or answer.take(), b""
        seen = [len(first)]  # not a variable of this function: compiled code reads it before it is set

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
            if not self._running.over:
                raise  # the client left
            self._break_off(exchange, reply, shutting_down(), events=False)
        finally:
            reply.feed_from(None)
            if delivered.usage is None and tail:
                delivered.usage = tail.usage()  # some engines write it before the last part
            if delivered.usage is None:
                delivered.passed = seen[0] // BYTES_PER_TOKEN

    def _break_off(self, exchange: Exchange, reply: ClientReply, error: GatewayError, *, events: bool) -> None:
        """End an answer that cannot be completed: with an error event where the dialect has one, else cut the connection."""
        delivered = exchange.delivered
        if delivered.done_sent:
            reply.end()  # nothing is missing but the end of the framing, and nothing may follow [DONE]
            return
        delivered.error = error.message
        event, reader = None, delivered.reader
        if reader and reader.reported:
            reply.end()  # the client has the engine's own error event
            return
        if events and not (reader and reader.within_event):
            seen = error if self._audience.is_operator(exchange.request) else error.redacted(exchange.record.id)
            event = exchange.dialect.error_event(seen, reader)
        if event is None:
            reply.cut()
        else:
            reply.end(event)


def _told(exchange: Exchange, reader: StreamReader) -> StreamReader:
    """What the client is told beside the engine's answer."""
    if exchange.tap:
        reader = exchange.tap.reader(reader)
    editor = exchange.editor()
    return editor.reader(reader) if editor else reader


def _length(answer: ReplicaAnswer, method: str) -> int | None:
    """The length of the body that the client is to expect; None: not known."""
    if method != "HEAD":
        return answer.head.length
    advertised = answer.head.get(b"content-length")
    return int(advertised) if advertised.isdigit() else None
