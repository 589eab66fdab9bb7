"""After a replica has broken off a stream: another one goes on with it, where the pool's configuration wants that.

    broken ── nothing but the end is missing ─────────────────────────────────────► the gateway ends it          good
       ▲ └─── another replica begins to stream the rest (failover.py) ──► spliced ──► complete                     good
       └───────────────────────────────── breaks off, too ◄──────────────────┘  └──► nobody can: an error event   failed
       └─── more than a text, too long, no other replica ───────────────────────────► an error event              impossible

The rules are those of failover: the lease moves to the best of the others, each replica is tried once, each outcome goes to its
breaker, and a few attempts are enough, for it may be the request that kills its engine.

A replica that dies breaks all its streams off at once. So they go on one after the other (`Past`), each in a turn of the event
loop of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.body import lease_of
from gateway.budget import LARGE_BODY, Lease
from gateway.errors import GatewayError, ReplicaFailure
from gateway.exchange import Exchange
from gateway.failover import Failover
from gateway.metrics import Metrics
from gateway.parser.parsing import Parsing
from gateway.relay import Attempt
from gateway.reply import Reply
from gateway.resume import Kept, Reading, Splice, Told, ending
from gateway.turns import TURN_S


class Past:
    """What clients of broken streams know, read one stream at a time: first come, first served. clock: monotonic seconds."""

    __slots__ = ("_clock", "_lock")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()

    async def told(self, kind: str, kept: Kept) -> Told | None:
        """What was kept tells, as `resume.Reading` has it, with turns for everybody else. None also if that was too much."""
        contended = self._lock.locked()
        async with self._lock:
            if not contended:  # so that also those of little text queue up behind it, and have a turn each
                await asyncio.sleep(0)
            data = kept.whole()
            if data is None:
                return None
            reading, due = Reading(kind, data), self._clock() + TURN_S
            while not reading.over:
                if not reading.step():
                    return None
                if self._clock() >= due:
                    await asyncio.sleep(0)
                    due = self._clock() + TURN_S
            return reading.result()


class Copy:
    """The request with the text so far, beside the client's own: charged to the request's lease until it is sent."""

    __slots__ = ("_lease", "_size")

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._size = 0

    def charge(self, size: int) -> bool:
        """False: there is no room for so many bytes. A small one is not worth counting."""
        if size < LARGE_BODY:
            return True
        if not self._lease.grow(size):
            return False
        self._size += size
        return True

    def drop(self) -> None:
        """Idempotent."""
        size, self._size = self._size, 0
        self._lease.shrink(size)


@dataclass(slots=True, eq=False, kw_only=True)
class Resumer:
    """See the top of this file. total_s: that an answer may take, 0: any time; clock: monotonic seconds."""

    failover: Failover
    parsing: Parsing
    metrics: Metrics
    total_s: float
    clock: Callable[[], float]
    past: Past = field(init=False)

    def __post_init__(self) -> None:
        self.past = Past(self.clock)

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
            if record.told:  # only the end of the framing is missing
                reply.end()
                unsaid = None
        except GatewayError as ours:
            unsaid = ours.with_traceback(None)  # that refers to this frame
        attempted = exchange.resumptions or len(record.failed_attempts) > tried
        result = "good" if unsaid is None else "failed" if attempted else "impossible"
        self.metrics.resumed.add((record.label, result))
        return unsaid

    async def _elsewhere(self, exchange: Exchange, reply: Reply, kept: Kept, error: GatewayError) -> GatewayError | None:
        """Go on at one replica after the other. error: what to say where that ends."""
        api = exchange.api
        while True:
            so_far = await self.past.told(api.kind, kept)
            if so_far is None:
                return error
            copy = Copy(lease_of(exchange.request))
            attempt: Attempt | None = None
            try:
                rest = await self._rest(exchange, so_far, copy)
                if rest == b"":
                    self._end(exchange, reply, so_far)
                    return None
                attempt = await self.failover.elsewhere(exchange, rest) if rest else None
                if attempt is None:
                    return error
                rest, so_far.text = None, ""  # it is sent, and nobody else needs it
                attempt.when_sent(copy.drop)
                await self._splice(exchange, reply, kept, attempt, Splice(so_far, api.strip_usage))
                return None
            except ReplicaFailure as failure:
                error = self._note(exchange, failure)
            finally:
                reply.feed_from(None)
                if attempt:
                    attempt.close()
                copy.drop()

    async def _rest(self, exchange: Exchange, so_far: Told, copy: Copy) -> bytes | None:
        """The request for the rest. b"": only the end is missing; None: it cannot be asked for, or there is no room for it."""
        if so_far.finished or so_far.done:
            return b""
        api, text = exchange.api, so_far.text
        if text and not copy.charge(len(api.body) + len(text)):
            return None
        return await self.parsing.continuation(api.kind, api.body, so_far, lease_of(exchange.request).account.client)

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
        except ReplicaFailure:
            if not splice.tap.done:
                raise
            reply.end()  # what comes after [DONE] is no failure: the answer is complete
        finally:
            record.told, exchange.within_event = splice.tap.done, splice.tap.within_event
            if splice.usage:
                record.usage = splice.usage
