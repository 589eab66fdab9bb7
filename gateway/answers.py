"""From the first byte on: a replica's answer goes to the client as it comes, and what it says of usage is noted.

Nothing is held back and nothing waits for a task: `sink` runs where the replica's bytes are read. After the first byte an error
can only be an event of the stream (`api/stream_errors.py`). Where its API is not known, or the client has the head of an event
and not its end, the connection is cut: what followed would be a part of that event, or make it look whole. A pool may want
broken streams to be resumed: then what goes out is kept, and `resumer.py` tries that first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.stream_errors import is_numbered, number_in, stream_error
from gateway.body import lease_of
from gateway.drain import Drain
from gateway.errors import ClientStalled, GatewayError, ReplicaFailure, shutting_down
from gateway.exchange import Audience, Exchange
from gateway.failover import EVENT_STREAM, Failover
from gateway.relay import Attempt, back
from gateway.reply import Reply
from gateway.resume import Kept
from gateway.resumer import Resumer
from gateway.tap import StreamTap


@dataclass(slots=True, eq=False, kw_only=True)
class Answers:
    """See the top of this file. audience: which clients may know who answered. patience_s: how long a client may leave an
    answer unread. clock: monotonic seconds.
    """

    failover: Failover
    resumer: Resumer
    drain: Drain
    audience: Audience
    patience_s: float
    clock: Callable[[], float]

    async def pass_on(self, exchange: Exchange, attempt: Attempt) -> Reply:
        """The whole answer to the client; returns when it is complete, or cannot be."""
        record = exchange.record
        chosen = exchange.booking.chosen
        routed = b""
        if self.audience.sees_headers(exchange.request):
            replica = chosen.replica.encode("ascii")
            routed = b"X-Warmroute-Replica: %b\r\nX-Warmroute-Cached-Tokens: %d\r\n" % (replica, chosen.matched_tokens)
        headers = b"%bX-Request-Id: %b\r\n%b" % (back(attempt.head, attempt.address), record.id.encode("ascii"), routed)
        record.status = attempt.status
        exchange.reply = reply = Reply(exchange.request, keep_alive=not self.drain.draining, patience_s=self.patience_s)
        if attempt.content_type == EVENT_STREAM and not exchange.body:
            await self._stream(exchange, attempt, reply, headers)
        elif exchange.body and exchange.tail is None:
            exchange.require_room()
            body, exchange.body = exchange.body, b""
            reply.begin(attempt.status, headers, length=len(body), first=body)
            record.last_byte = self.clock()
        else:
            await self._copy(exchange, attempt, reply, headers)
        return reply

    async def _stream(self, exchange: Exchange, attempt: Attempt, reply: Reply, headers: bytes) -> None:
        """The events to the client as they come."""
        record = exchange.record
        if not any(name == b"cache-control" for name, _ in attempt.head.headers):
            headers += b"Cache-Control: no-cache\r\n"
        headers += b"X-Accel-Buffering: no\r\n"  # nginx in front must not hold chunks back
        record.last_byte = self.clock()
        kept, completed = None, False
        if exchange.api.metered and attempt.status == 200:
            record.first_byte = record.last_byte
            if exchange.api.countable:  # else the router would take the prefill of several prompts for that of one
                exchange.booking.first_token(record.last_byte)
            kept = Kept(lease_of(exchange.request)) if exchange.target.resume_streams else None
        try:
            failure = await self._pump(exchange, attempt, reply, headers, kept)
            if failure and kept:
                reply.feed_from(None)
                attempt.close()
                error = await self.resumer.go_on(exchange, reply, kept, failure)
            else:
                error = self.failover.broke_off(exchange, failure) if failure else None
            completed = error is None
            if error:
                self._cut(exchange, reply, error, events=True)
        except ClientStalled:
            reply.cut()  # what is written already would keep the connection open
            raise
        except asyncio.CancelledError:
            if not self.drain.over:
                raise  # the client left
            self._cut(exchange, reply, shutting_down(), events=True)
        finally:
            reply.feed_from(None)
            if exchange.broken:
                self.failover.settle(exchange, completed=completed)

    async def _pump(
        self, exchange: Exchange, attempt: Attempt, reply: Reply, headers: bytes, kept: Kept | None
    ) -> ReplicaFailure | None:
        """The events of one replica. kept: where to keep what goes out. Returns why it did not come to an end."""
        record, clock = exchange.record, self.clock
        tap = StreamTap(exchange.api.strip_usage)
        numbered = is_numbered(record.path)

        def sink(data: bytes) -> None:
            out = tap.feed(data)
            if numbered:
                exchange.last_number = number_in(out, exchange.last_number)
            reply.write(out)
            record.last_byte = clock()

        def keep(data: bytes) -> None:
            assert kept
            out = tap.feed_closely(data)
            reply.write(out)
            kept.add(out)
            record.last_byte = clock()
            tap.raise_failure()

        try:
            if kept is None:
                first = tap.feed(attempt.take_turn())
                if numbered:
                    exchange.last_number = number_in(first, -1)
                reply.begin(attempt.status, headers, length=None, first=first)
            else:
                reply.begin(attempt.status, headers, length=None)
                keep(attempt.take_turn())
            reply.feed_from(attempt)
            await attempt.pump(keep if kept else sink)
            last = tap.finish()  # before it is asked: some engines end with a [DONE] that has no blank line behind it
            if exchange.api.metered and attempt.status == 200 and not tap.done:
                raise ReplicaFailure("reset", "the stream ended without [DONE]")
            reply.end(last)
        except ReplicaFailure as failure:
            return failure
        finally:
            record.told = tap.done
            exchange.within_event = tap.within_event
            if tap.usage:  # also when the client leaves before the very end
                record.usage = tap.usage
        return None

    async def _copy(self, exchange: Exchange, attempt: Attempt, reply: Reply, headers: bytes) -> None:
        """Any other answer as it comes: a large plain one of a generation, whose beginning is in `exchange.body`, or one of
        another endpoint.
        """
        record, tail = exchange.record, exchange.tail
        exchange.require_room()
        first, exchange.body = exchange.body or attempt.take(), b""

        def sink(data: bytes) -> None:
            reply.write(data)
            record.last_byte = self.clock()
            if tail:
                tail.feed(data)

        try:
            reply.begin(attempt.status, headers, length=_length(attempt, exchange.request.method), first=first)
            del first
            reply.feed_from(attempt)
            await attempt.pump(sink)
            reply.end()
            record.usage = tail.usage() if tail else None
        except ReplicaFailure as failure:
            error = self.failover.broke_off(exchange, failure)
            if exchange.broken:
                self.failover.settle(exchange, completed=False)
            self._cut(exchange, reply, error, events=False)
        except ClientStalled:
            reply.cut()
            raise
        except asyncio.CancelledError:
            if not self.drain.over:
                raise  # the client left
            self._cut(exchange, reply, shutting_down(), events=False)
        finally:
            reply.feed_from(None)

    def _cut(self, exchange: Exchange, reply: Reply, error: GatewayError, *, events: bool) -> None:
        """End an answer that cannot be completed: say so where the dialect has words for it, else cut the connection."""
        if exchange.record.told:
            reply.end()  # nothing is missing but the end of the framing, and nothing may follow [DONE]
            return
        record = exchange.record
        record.error = error.message
        event = None
        if events and not exchange.within_event:
            seen = error if self.audience.is_operator(exchange.request) else error.redacted(record.id)
            event = stream_error(record.path, seen, exchange.last_number)
        if event is None:
            reply.cut()
        else:
            reply.end(event)


def _length(attempt: Attempt, method: str) -> int | None:
    """What the client is told of the body's length."""
    if method != "HEAD":
        return attempt.head.length
    told = attempt.head.get(b"content-length")
    return int(told) if told.isdigit() else None
