"""The prefill leg: whether a prompt gets one, which prefiller computes it, and what becomes of a prefiller that fails.

    way: none is well, several answers, or the rule of router/pricing/legs.py ──► local
    leg: the best prefiller, by the router ──► fails without an answer ──► the best of the others

MAX_LEGS prefillers that got the prompt may fail or hang; refused connections and 429 do not count. A prefiller that failed with
a prompt is blamed only once the same prompt was answered: by the decoder, or by the replica of a later attempt. One without a
connection is blamed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from gateway.errors import HUNG, ReplicaFailure
from gateway.features.disaggregation.metrics import DisaggregationMetrics
from gateway.fleet.breaker import Trial
from gateway.fleet.directory import Fleet, Target
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.request.slots import Slot
from gateway.upstream.client import UpstreamClient
from router import Booking, Outcome, Router
from router.pricing.legs import local_reason

MAX_LEGS: Final = 2  # prefillers that may fail with one prompt, which may be the cause
REMOTE: Final = "remote"
NO_PREFILLER, SEVERAL = "no_prefiller", "several"
_SUSPECTS: Final = Slot[list[tuple[Trial, ReplicaState]]]("disaggregation")  # failed prefillers of a request without an answer
FAILED, REFUSED, NO_PARAMS, NOT_TRANSFERRED = "prefill_failed", "prefill_refused", "no_params", "transfer_failed"


class Leg:
    """The prefill leg of one request, until it ends. state: the present prefiller. failed: prefillers that have failed with the
    prompt, until the decoder has shown whether they are to blame. hung: how many of them hang. tried: all that were asked.
    """

    __slots__ = ("_owner", "booking", "exchange", "failed", "hung", "since", "state", "trial", "tried")

    def __init__(self, owner: PrefillLegs, exchange: Exchange, booking: Booking, state: ReplicaState, since: float) -> None:
        self._owner = owner
        self.exchange = exchange
        self.booking = booking
        self.state = state
        self.since = since
        self.trial = state.breaker.begin(since)
        self.failed: list[tuple[Trial, ReplicaState]] = []
        self.hung = 0
        self.tried = {state.name}

    def answers(self, status: int) -> None:
        """The prefiller answers."""
        if status < 500:
            self.trial.success()
        else:
            self.suspect()

    def suspect(self) -> None:
        """The prefiller has failed; its prompt may be the cause."""
        self.trial.answers()
        self.failed.append((self.trial, self.state))

    def move(self, failure: ReplicaFailure) -> bool:
        """The prefiller has failed without an answer. False: no other one may be tried."""
        return self._owner.move(self, failure)

    def close(self, outcome: Outcome) -> None:
        """End of the leg. Idempotent."""
        self._owner.closed(self, outcome)

    def judge(self, *, answered: bool) -> None:
        """The prefillers that have failed did so by themselves, if the decoder has answered, or if another replica will."""
        self._owner.judge(self, answered=answered)


class PrefillLegs:
    """The prefill legs of one process (see the module). clock: monotonic seconds. local_tokens: the present configuration's."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: Router,
        upstream: UpstreamClient,
        metrics: DisaggregationMetrics,
        clock: Callable[[], float],
        local_tokens: Callable[[], int],
    ) -> None:
        self.clock = clock
        self.upstream = upstream
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._local_tokens = local_tokens

    def count(self, exchange: Exchange, way: str) -> None:
        """Count where a prompt is computed."""
        self._metrics.prompts.add((exchange.target.pool, way))

    def local_way(self, exchange: Exchange) -> str:
        """The reason why the decoder computes the prompt itself; "": a prefiller does."""
        if exchange.api.answers > 1:
            return SEVERAL  # the first of several answers would free the blocks
        target, now = exchange.target, self.clock()
        if not target.prefillers or not self._fleet.is_well(replace(target, replicas=target.prefillers), now):
            return NO_PREFILLER
        best = self._router.rank(exchange.booking.prompt, self._candidates(exchange.target), now)[0].best
        return local_reason(exchange.booking.chosen, best, self._local_tokens())

    def begin(self, exchange: Exchange) -> Leg | None:
        """Book the best prefiller. None: none is up."""
        candidates, now = self._candidates(exchange.target), self.clock()
        if not candidates:
            return None
        booking = self._router.choose(exchange.booking.prompt, candidates, now)
        booking.release(now)  # it is sent at once, also behind another leg that computes its prefix
        exchange.prefiller = booking.chosen.replica
        return Leg(self, exchange, booking, exchange.target.prefillers[booking.chosen.replica], now)

    def renew(self, exchange: Exchange, replica: ReplicaState) -> None:
        """The decoder's part begins: what its booking shows from now on is the transfer."""
        now = self.clock()
        exchange.booking.move([replica.name], now)
        exchange.booking.release(now)

    def move(self, leg: Leg, failure: ReplicaFailure) -> bool:
        """See `Leg.move`."""
        now = self.clock()
        self._fleet.failed(leg.state, failure)
        if failure.blameless:
            leg.trial.abandoned()
            leg.hung += failure.reason == HUNG
        elif failure.reached:
            leg.suspect()
        else:
            leg.trial.failure(now)
            self._fleet.suspect(leg.state)
        target = self._fleet.renewed(leg.exchange.target)  # the request keeps its own, which has its decoder
        again = len(leg.failed) + leg.hung < MAX_LEGS and not failure.limit
        others = self._candidates(target, leg.tried) if again else ()
        if not others:
            return False
        leg.booking.move(others, now)
        leg.booking.release(now)
        leg.exchange.prefiller = leg.booking.chosen.replica
        leg.state = target.prefillers[leg.exchange.prefiller]
        leg.tried.add(leg.state.name)
        leg.trial = leg.state.breaker.begin(now)
        return True

    def closed(self, leg: Leg, outcome: Outcome) -> None:
        """See `Leg.close`."""
        now = self.clock()
        if not leg.booking.lease.closed:
            self._metrics.prefill_seconds.observe((leg.exchange.target.pool,), now - leg.since)
        if not any(trial is leg.trial for trial, _ in leg.failed):
            leg.trial.abandoned()  # if there was no verdict
        if leg.booking.close(outcome, now):
            self._fleet.zero_hits(leg.state.name)

    def judge(self, leg: Leg, *, answered: bool) -> None:
        """See `Leg.judge`."""
        if answered:
            self._blame(leg.failed)
        elif leg.failed:
            record = leg.exchange.record
            _SUSPECTS.set(record, [*(_SUSPECTS.get(record) or ()), *leg.failed])
        leg.failed.clear()

    def delivered(self, exchange: Exchange) -> None:
        """The request has its answer."""
        if exchange.record.answer.complete:
            self._blame(_SUSPECTS.get(exchange.record) or ())

    def _blame(self, failed: Iterable[tuple[Trial, ReplicaState]]) -> None:
        for trial, state in failed:
            trial.failure(self.clock())
            self._fleet.suspect(state)

    def _candidates(self, target: Target, tried: Collection[str] = ()) -> Collection[str]:
        """The prefillers that may compute a prompt now."""
        if not target.prefillers:
            return ()
        return self._fleet.candidates(replace(target, replicas=target.prefillers), self.clock(), tried, resting=False)
