"""After a replica has broken off a stream: another one goes on with it, where the pool's configuration wants that.

    broken ── nothing but the end is missing ─────────────────────────────────────► the gateway ends it          good
       ▲ └─── another replica begins to stream the rest (failover.py) ──► spliced ──► complete                     good
       └───────────────────────────────── breaks off, too ◄──────────────────┘  └──► nobody can: an error event   failed
       └─── more than a text, too long, no other replica ───────────────────────────► an error event              impossible

The rules are those of failover: the lease moves to the best of the others, each replica is tried once, each outcome goes to its
breaker, and a few attempts are enough, for it may be the request that kills its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.body import lease_of
from gateway.errors import GatewayError, ReplicaFailure
from gateway.exchange import Exchange
from gateway.failover import Failover
from gateway.metrics import Metrics
from gateway.parser.parsing import Parsing
from gateway.relay import Attempt
from gateway.reply import Reply
from gateway.resume import Kept, Reading, Splice, Told, ending
from gateway.tap import events_of

EVENTS_AT_ONCE: Final = 512  # read without giving the event loop back


@dataclass(slots=True, eq=False, kw_only=True)
class Resumer:
    """See the top of this file. total_s: that an answer may take, 0: any time; clock: monotonic seconds."""

    failover: Failover
    parsing: Parsing
    metrics: Metrics
    total_s: float
    clock: Callable[[], float]

    async def go_on(self, exchange: Exchange, reply: Reply, kept: Kept, failure: ReplicaFailure) -> GatewayError | None:
        """Complete the answer of which `kept` went out. Returns what to tell the client if that cannot be done."""
        record = exchange.record
        error = self._note(exchange, failure)
        tried = len(record.failed_attempts)
        left_s = self.total_s - (self.clock() - record.begun) if self.total_s else None
        unsaid: GatewayError | None
        try:
            async with asyncio.timeout(left_s):
                unsaid = await self._elsewhere(exchange, reply, kept, error)
        except TimeoutError:
            unsaid = error
        except GatewayError as ours:
            unsaid = ours
        attempted = exchange.resumptions or len(record.failed_attempts) > tried
        result = "good" if unsaid is None else "failed" if attempted else "impossible"
        self.metrics.resumed.add((record.label, result))
        return unsaid

    async def _elsewhere(self, exchange: Exchange, reply: Reply, kept: Kept, error: GatewayError) -> GatewayError | None:
        """Go on at one replica after the other. error: what to say where that ends."""
        api = exchange.api
        while True:
            data = kept.whole()
            so_far = None if data is None else await _told(api.kind, data)
            if so_far is None:
                return error
            complete = so_far.finished or so_far.done
            client = lease_of(exchange.request).account.client
            rest = b"" if complete else await self.parsing.continuation(api.kind, api.body, so_far, client)
            if rest is None:
                return error
            if not rest:
                self._end(exchange, reply, so_far)
                return None
            attempt = await self.failover.elsewhere(exchange, rest)
            if attempt is None:
                return error
            try:
                await self._splice(exchange, reply, kept, attempt, Splice(so_far, api.strip_usage))
                return None
            except ReplicaFailure as failure:
                error = self._note(exchange, failure)
            finally:
                reply.feed_from(None)
                attempt.close()

    def _note(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        """The replica that has the answer broke it off."""
        record = exchange.record
        record.attempt_failed(record.replica, failure.reason, f"broke off: {failure.message}")
        return self.failover.broke_off(exchange, failure)

    def _end(self, exchange: Exchange, reply: Reply, so_far: Told) -> None:
        """Say what alone is missing."""
        record, api = exchange.record, exchange.api
        record.usage = record.usage or so_far.usage
        reply.end(ending(api.kind, so_far, None if api.strip_usage else record.usage))
        record.last_byte = self.clock()

    async def _splice(self, exchange: Exchange, reply: Reply, kept: Kept, attempt: Attempt, splice: Splice) -> None:
        """Pass the continuation on. Raises ReplicaFailure if that breaks off, too."""
        record, clock = exchange.record, self.clock
        record.resumed += 1
        exchange.booking.first_token(clock())

        def sink(data: bytes) -> None:
            out = splice.feed(data)
            reply.write(out)
            kept.add(out)
            record.last_byte = clock()
            splice.tap.raise_failure()

        try:
            sink(attempt.take_turn())
            reply.feed_from(attempt)
            await attempt.pump(sink)
            last = splice.finish()
            if not splice.tap.done:
                raise ReplicaFailure("reset", "the stream ended without [DONE]")
            reply.end(last)
        finally:
            exchange.within_event = splice.tap.within_event
            if splice.usage:
                record.usage = splice.usage


async def _told(kind: str, data: bytes) -> Told | None:
    """`resume.told`, with turns for everybody else: a dead replica breaks all its streams off at once."""
    events, reading = events_of(data), Reading(kind)
    for at in range(0, len(events), EVENTS_AT_ONCE):
        if not reading.take(events[at : at + EVENTS_AT_ONCE]):
            return None
        await asyncio.sleep(0)
    return reading.result()
