"""Until the first byte: an attempt on the chosen replica, and while it fails, on the best of the others.

Nothing has gone to the client yet, so all of it is invisible to it. What bounds it: each replica is tried once; MAX_REACHED
attempts may reach a replica, for a prompt that kills its engine must not walk through the whole fleet (refused connections do
not count, they cannot be the prompt's fault); and retries after refusals, silence and garbage are at most a fifth of all
requests, so that they do not add to an overload (`health.RetryBudget`). A lost connection needs no budget: what a dead replica
was doing moves to the others, and is done once, however many requests that are. Every outcome goes to the replica's breaker.

The same for a stream that broke off after its first byte, where it may be resumed (`resumer.py`): `elsewhere`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import orjson

from gateway.errors import REFUSED, UNREACHABLE, GatewayError, ReplicaFailure
from gateway.exchange import Exchange, Request
from gateway.health import RetryBudget, jitter
from gateway.metering import Usage, parse_usage
from gateway.metrics import Metrics
from gateway.plain import PlainRequest
from gateway.relay import Attempt, Call, Relay, onward
from gateway.replicas import Fleet
from gateway.tap import failure_of, first_event
from router import Candidate

MAX_REACHED: Final = 3
MAX_RESUMPTIONS: Final = 3
MAX_PLAIN_ANSWER: Final = 256 << 20  # bytes; a plain answer is read whole before it goes on

EVENT_STREAM: Final = "text/event-stream"
_LOST: Final = frozenset([REFUSED, UNREACHABLE, "reset"])
_OVERLOADED: Final = 429
_UNAVAILABLE: Final = 503


@dataclass(slots=True, eq=False, kw_only=True)
class Failover:
    """See the top of this file. clock: monotonic seconds."""

    fleet: Fleet
    relay: Relay
    metrics: Metrics
    clock: Callable[[], float]
    chance: random.Random
    budget: RetryBudget = field(default_factory=RetryBudget)

    async def first_answer(self, exchange: Exchange) -> Attempt:
        """The first attempt that gives an answer. Raises GatewayError if none does."""
        self.budget.request()
        call = _call_of(exchange, exchange.api.body)
        reached, refusal, tries = 0, None, 0
        most = MAX_REACHED if call.repeatable else 1
        while True:
            tries += 1
            candidate = exchange.booking.chosen
            exchange.record.chose(candidate)
            try:
                attempt = await self._try(exchange, candidate, call)
            except ReplicaFailure as failure:
                self.fleet.failed(candidate.replica, failure)
                reached += failure.reached
                exchange.record.attempt_failed(candidate.replica, failure.reason, failure.message)
            else:
                if attempt.status < 500 and attempt.status != _OVERLOADED:
                    return attempt
                refusal = attempt
                reached += 1
                exchange.record.attempt_failed(candidate.replica, "status", f"answered {attempt.status}")
            try:
                again = reached < most and await self._next(exchange, tries)
            except BaseException:
                if refusal:
                    refusal.close()
                raise
            if not again:
                break
            if refusal:
                refusal.close()
                refusal = None
        if refusal:
            return refusal  # the replica refused, and no other is left: the client hears its own words
        failures = "; ".join(f"{attempt['replica']}: {attempt['error']}" for attempt in exchange.record.failed_attempts)
        text = f"No replica could answer ({failures}). Retry; see /warmroute/replicas."
        raise GatewayError(502, "replica_failed", text, public="No replica could answer. Retry.")

    def broke_off(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        """The replica failed after its answer's first byte. Returns what the client may be told."""
        replica = exchange.booking.chosen.replica
        self.metrics.broken.add((exchange.record.label, replica))
        self.fleet.failed(replica, failure)
        text = f"The replica {replica} failed while it answered ({failure.message}). Retry the request."
        return GatewayError(502, "replica_failed", text, public="The replica failed while it answered. Retry the request.")

    async def elsewhere(self, exchange: Exchange, body: bytes) -> Attempt | None:
        """The answer broke off: the first of the others that begins to stream what `body` asks for. None if none does."""
        call = _call_of(exchange, body)
        while exchange.resumptions < MAX_RESUMPTIONS and await self._next(exchange, exchange.resumptions + 1):
            candidate = exchange.booking.chosen
            exchange.record.chose(candidate)
            try:
                attempt = await self._try(exchange, candidate, call)
            except ReplicaFailure as failure:
                self.fleet.failed(candidate.replica, failure)
                exchange.resumptions += failure.reached
                exchange.record.attempt_failed(candidate.replica, failure.reason, failure.message)
                continue
            exchange.resumptions += 1
            if attempt.status == 200 and attempt.content_type == EVENT_STREAM:
                return attempt
            attempt.close()
            exchange.record.attempt_failed(candidate.replica, "status", f"answered {attempt.status} to the rest of a stream")
            if attempt.status < 500 and attempt.status != _OVERLOADED:
                return None  # it does not take such a request, nor will the others
        return None

    async def _next(self, exchange: Exchange, tries: int) -> bool:
        """Move the lease to the best of those that were not tried yet. False if there is none, or no budget for it."""
        live = self._untried(exchange)
        if not live:
            return False
        reason = exchange.record.failed_attempts[-1]["reason"]
        if reason not in _LOST and not self.budget.take():
            self.metrics.retries_refused.add()
            return False
        self.metrics.retries.add((reason,))
        if pause_s := jitter(tries, self.chance, at_once=reason in _LOST):
            await asyncio.sleep(pause_s)
            live = self._untried(exchange)  # meanwhile replicas may have come and gone
        if live:
            exchange.booking.move(live, self.clock())
        return bool(live)

    def _untried(self, exchange: Exchange) -> list[str]:
        """Who may serve the request now and was not tried yet."""
        exchange.target = self.fleet.renewed(exchange.target)
        tried = {attempt["replica"] for attempt in exchange.record.failed_attempts}
        return [name for name in self.fleet.candidates(exchange.target, self.clock()) if name not in tried]

    async def _try(self, exchange: Exchange, candidate: Candidate, call: Call) -> Attempt:
        """One attempt on one replica, up to its first byte (its whole body, if it is a plain answer to a generation)."""
        state = exchange.target.replicas[candidate.replica]
        watched = state.breaker.begin(self.clock())
        try:
            attempt = await self.relay.open(state.config.url, exchange.call_to(state, call))
            try:
                await self._look(exchange, attempt)
            except BaseException:
                attempt.close()
                raise
            if attempt.status in (_OVERLOADED, _UNAVAILABLE) and (seconds := _retry_after(attempt)):
                self.fleet.rests(state, seconds, self.clock())
            elif attempt.status >= 500:
                watched.failure(self.clock())
                self.fleet.troubles(state)
            else:
                watched.success()
            return attempt
        except ReplicaFailure:
            watched.failure(self.clock())
            self.fleet.troubles(state)
            raise
        finally:
            watched.abandoned()

    async def _look(self, exchange: Exchange, attempt: Attempt) -> None:
        """See whether it is what an engine says. Raises ReplicaFailure if not."""
        api = exchange.api
        if not api.metered or attempt.status != 200:
            return
        if attempt.content_type == EVENT_STREAM and api.stream:
            if attempt.empty:
                raise ReplicaFailure("garbage", "the stream is empty")
            await _hear_first(attempt)
            return
        exchange.body = await attempt.read(MAX_PLAIN_ANSWER)
        exchange.record.usage = _usage_of(exchange.body)


async def _hear_first(attempt: Attempt) -> None:
    """Raises ReplicaFailure if a stream begins with its engine's failure, which is told with status 200 too.

    Nothing else is waited for, and of an error no more than the tap holds back anyway.
    """
    while (event := first_event(attempt.peek())) == b"" and not attempt.complete:
        await attempt.more()
    if event and (failure := failure_of(event)):
        raise failure


def _call_of(exchange: Exchange, body: bytes) -> Call:
    request, api = exchange.request, exchange.api
    headers = b"%bX-Request-Id: %b\r\n" % (_onward(request), exchange.record.id.encode("ascii"))
    return Call(request.method, _path(request), headers, body, repeatable=api.repeatable or request.method != "POST")


def _onward(request: Request) -> bytes:
    """Its header lines as they go to a replica."""
    if not isinstance(request, PlainRequest):
        return onward(request.raw_headers)
    head = request.head
    if head.onward is None:
        head.onward = onward(head.headers)
    return head.onward


def _path(request: Request) -> str:
    """The path with its query, as it came where that is plain."""
    raw = request.raw_path
    if isinstance(request, PlainRequest):
        return raw
    return raw if raw.startswith("/") and raw.isascii() and "#" not in raw else request.rel_url.raw_path_qs


def _retry_after(attempt: Attempt) -> int:
    """Seconds for which the replica asks to be left alone; 0: it does not, or by a date, which nobody's clock agrees on."""
    told = attempt.head.get(b"retry-after")
    return int(told) if told.isdigit() and len(told) < 10 else 0


def _usage_of(body: bytes) -> Usage | None:
    """The usage of a plain answer. Raises ReplicaFailure if the answer is no JSON object: no engine says such a thing."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return parse_usage(answer)
