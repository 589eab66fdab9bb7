"""Until the first byte: an attempt on the chosen replica, and while it fails, on the best of the others.

Nothing has gone to the client yet, so all of it is invisible to it. What bounds it: each replica is tried once; a request is
sent MAX_REACHED times at most, for a prompt that kills its engine must not walk through the whole fleet (refused connections do
not count, they cannot be the prompt's fault; the silent repetition on a fresh connection does); and retries after refusals,
silence and garbage are at most a fifth of all requests, so that they do not add to an overload (`health.RetryBudget`). A lost
connection needs no budget: what a dead replica was doing moves to the others, and is done once, however many requests that are.

What a failed attempt means for its replica's breaker is decided when the request's outcome is known (`blame.py`).

The same for a stream that broke off after its first byte, where it may be resumed (`resumer.py`): `elsewhere`. With what was
sent before that byte, the request is sent MAX_SENT times at most.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.blame import Alone, Doubts, is_answer
from gateway.body import lease_of
from gateway.errors import REFUSED, UNREACHABLE, GatewayError, ReplicaFailure
from gateway.excerpt import excerpt
from gateway.exchange import Exchange
from gateway.health import RetryBudget, jitter
from gateway.metrics import Metrics
from gateway.outgoing import call_of
from gateway.plain_answer import MAX_HELD_ANSWER, UsageTail, usage_of
from gateway.relay import Attempt, Call, Relay
from gateway.replicas import Fleet
from gateway.tap import MAX_COMMENT_BYTES, StreamBegin, failure_of, first_event
from router import Candidate

MAX_REACHED: Final = 3  # times that a request is sent before its answer's first byte
MAX_SENT: Final = 4  # times that it is sent in all, where broken streams are resumed

EVENT_STREAM: Final = "text/event-stream"
_LOST: Final = frozenset([REFUSED, UNREACHABLE, "reset"])


@dataclass(slots=True, eq=False, kw_only=True)
class Failover:
    """See the top of this file. clock: monotonic seconds."""

    fleet: Fleet
    relay: Relay
    metrics: Metrics
    clock: Callable[[], float]
    chance: random.Random
    budget: RetryBudget = field(default_factory=RetryBudget)
    alone: Alone = field(default_factory=Alone)

    async def first_answer(self, exchange: Exchange) -> Attempt:
        """The first attempt that gives an answer, else the last refusal. Raises GatewayError if there is neither."""
        self.budget.request()
        call, doubts = call_of(exchange, exchange.api.body), Doubts(self.fleet, self.alone, exchange.request)
        reached = tries = 0
        refusal: Attempt | None = None
        most = MAX_REACHED if call.repeatable else 1
        try:
            while True:
                tries += 1
                candidate = exchange.booking.chosen
                exchange.record.chose(candidate)
                try:
                    attempt = await self._try(exchange, candidate, call, doubts, fresh=reached > 0)
                except ReplicaFailure as failure:
                    refusal = None
                    reached += failure.reached
                    self._failed(exchange, candidate, failure)
                else:
                    if is_answer(attempt):
                        doubts.answered = True
                        exchange.record.error = _said(attempt) if attempt.status >= 400 else ""
                        exchange.sent = reached + attempt.sends
                        return attempt
                    refusal = attempt
                    reached += attempt.sends
                    exchange.record.attempt_failed(candidate.replica, "status", _said(attempt))
                doubts.refused = refusal is not None
                if reached >= most or not await self._next(exchange, tries, doubts):
                    break
                if refusal:
                    refusal.close()
            if refusal:  # and no other replica is left: the client gets its own words
                attempt, refusal = refusal, None
                exchange.record.error = exchange.record.failed_attempts[-1]["error"]
                return attempt
        finally:
            if refusal:
                refusal.close()
            if doubts.failed:
                doubts.settle(self.clock())
        failures = "; ".join(f"{attempt['replica']}: {attempt['error']}" for attempt in exchange.record.failed_attempts)
        text = f"No replica could answer ({failures}). Retry; see /warmroute/replicas."
        raise GatewayError(502, "replica_failed", text, public="No replica could answer. Retry.")

    def _failed(self, exchange: Exchange, candidate: Candidate, failure: ReplicaFailure) -> None:
        self.fleet.failed(candidate.replica, failure)
        exchange.record.attempt_failed(candidate.replica, failure.reason, failure.message)

    def broke_off(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        """The replica failed after its answer's first byte; `settle` is to follow. Returns what the client may be told."""
        replica = exchange.booking.chosen.replica
        if exchange.watched and not (exchange.record.told or failure.blameless):
            exchange.broken.append(exchange.watched)
        exchange.watched = None
        if not failure.blameless:
            self.metrics.broken.add((exchange.record.label, replica))
        self.fleet.failed(replica, failure)
        text = f"The replica {replica} failed while it answered ({failure.message}). Retry the request."
        return GatewayError(502, "replica_failed", text, public="The replica failed while it answered. Retry the request.")

    def settle(self, exchange: Exchange, *, completed: bool) -> None:
        """An answer broke off: by its replica's fault if another replica completed it, by the request's if another one failed
        with it as well; if nobody else was asked, `lone_failures.py` tells. A replica that has come up since is another one.
        """
        broken, exchange.broken = exchange.broken, []
        now, compared = self.clock(), exchange.resumptions > 0
        for watched, state in broken:
            if state.up_since > watched.begun:
                continue
            if completed if compared else self.alone.failed(exchange.request, state, now):
                watched.broke_off(now)
                self.fleet.troubles(state)

    def completed(self, exchange: Exchange) -> None:
        """The answer was good and went out whole."""
        if exchange.watched:
            watched, state = exchange.watched
            self.alone.answered(exchange.request, state, watched)

    async def elsewhere(self, exchange: Exchange, body: bytes) -> Attempt | None:
        """The answer broke off: the first of the others that begins to stream what `body` asks for. None if none does."""
        doubts = Doubts(self.fleet, self.alone, exchange.request)
        doubts.unsure = True  # one has failed with this request already
        try:
            attempt = await self._continuation(exchange, call_of(exchange, body), doubts)
            doubts.answered = attempt is not None
            return attempt
        finally:
            if doubts.failed:
                doubts.settle(self.clock())

    async def _continuation(self, exchange: Exchange, call: Call, doubts: Doubts) -> Attempt | None:
        most = MAX_SENT - exchange.sent
        while exchange.resumptions < most and await self._next(exchange, exchange.resumptions + 1, doubts):
            candidate = exchange.booking.chosen
            exchange.record.chose(candidate)
            try:
                attempt = await self._try(exchange, candidate, call, doubts, fresh=True)
            except ReplicaFailure as failure:
                exchange.resumptions += failure.reached
                self._failed(exchange, candidate, failure)
                continue
            exchange.resumptions += 1
            if attempt.status == 200 and attempt.content_type == EVENT_STREAM:
                return attempt
            exchange.record.attempt_failed(candidate.replica, "status", f"asked for the rest of a stream, it {_said(attempt)}")
            attempt.close()
            if is_answer(attempt):
                return None  # it does not take such a request, nor will the others
        return None

    async def _next(self, exchange: Exchange, tries: int, doubts: Doubts) -> bool:
        """Move the lease to the best of those that were not tried yet. False if there is none, or no budget for it."""
        live = self._untried(exchange, doubts)
        if not live:
            return False
        reason = exchange.record.failed_attempts[-1]["reason"]
        if reason not in _LOST and not self.budget.take():
            self.metrics.retries_refused.add()
            doubts.unsure = True
            return False
        self.metrics.retries.add((reason,))
        if pause_s := jitter(tries, self.chance, at_once=reason in _LOST):
            await asyncio.sleep(pause_s)
            live = self._untried(exchange, doubts)  # meanwhile replicas may have come and gone
        if live:
            exchange.booking.move(live, self.clock())
        return bool(live)

    def _untried(self, exchange: Exchange, doubts: Doubts) -> Collection[str]:
        """Who may serve the request now and was not tried yet. If the client can be given a refusal, replicas that asked for
        rest are left alone.
        """
        exchange.target = self.fleet.renewed(exchange.target)
        tried = {attempt["replica"] for attempt in exchange.record.failed_attempts}
        return self.fleet.candidates(exchange.target, self.clock(), tried, resting=not doubts.refused)

    async def _try(self, exchange: Exchange, candidate: Candidate, call: Call, doubts: Doubts, *, fresh: bool) -> Attempt:
        """One attempt on one replica, up to its first byte. Of a plain answer to a generation the whole body is read, of one
        that is larger than MAX_HELD_ANSWER the beginning.

        fresh: on a connection of its own.
        """
        state = exchange.target.replicas[candidate.replica]
        watched = state.breaker.begin(self.clock())
        try:
            attempt = await self.relay.open(state.config.url, exchange.call_to(state, call), fresh=fresh)
            watched.answers()
            try:
                await self._look(exchange, attempt)
            except BaseException:
                attempt.close()
                raise
            if is_answer(attempt) and not state.refusals:
                watched.success()
            else:
                doubts.answer(attempt, state, watched, self.clock())
            exchange.watched = watched, state
            return attempt
        except ReplicaFailure as failure:
            doubts.failure(failure, state, watched, self.clock())
            raise
        except BaseException:
            watched.abandoned()
            raise

    async def _look(self, exchange: Exchange, attempt: Attempt) -> None:
        """See whether it is what an engine says. Raises ReplicaFailure if not."""
        api = exchange.api
        if not api.metered or attempt.status != 200:
            return
        if attempt.content_type == EVENT_STREAM and api.stream:
            data = attempt.peek()
            if not data.startswith(b"data:") or first_event(data) is not None:  # nearly all streams begin with their first data
                await first_data(attempt)
            return
        lease = lease_of(exchange.request)
        before = lease.held
        try:
            body = await attempt.read_begin(MAX_HELD_ANSWER, exchange.charge)
        except BaseException:
            lease.shrink(lease.held - before)  # what there was of this answer is dropped
            raise
        if len(body) <= MAX_HELD_ANSWER:
            exchange.record.usage = usage_of(body)
        else:
            exchange.tail = UsageTail(body)
        exchange.body = body


def _said(attempt: Attempt) -> str:
    """An answer's status, and of an error the engine's message, as far as its body is here."""
    said = excerpt(attempt.peek()) if attempt.status >= 400 else ""
    return f"answered {attempt.status}: {said}" if said else f"answered {attempt.status}"


class Opening(Protocol):
    """What `first_data` uses of an Attempt."""

    @property
    def complete(self) -> bool: ...
    def peek(self, start: int = 0) -> bytes: ...
    def still_prefill(self) -> None: ...
    async def more(self) -> None: ...


async def first_data(attempt: Opening) -> None:
    """Wait for the first data of a stream, for a comment is no token: until then the request can go to another replica.

    Raises ReplicaFailure if there is none, or if it is the engine's failure, which comes with status 200 too. Of an error no
    more is waited for than the tap holds back anyway. O(bytes), however small the pieces are in which they come.
    """
    begin, data, seen = StreamBegin(), attempt.peek(), 0
    while True:
        seen += len(data)
        event = begin.feed(data)
        if event and (failure := failure_of(event)):
            raise failure
        if event != b"":
            return
        if begin.silent:
            if seen > MAX_COMMENT_BYTES:
                raise ReplicaFailure("garbage", f"the stream begins with more than {MAX_COMMENT_BYTES} bytes of comments")
            if attempt.complete:
                raise ReplicaFailure("garbage", "the stream is empty")
            attempt.still_prefill()
        elif attempt.complete:
            return
        await attempt.more()
        data = attempt.peek(seen)
