"""Moves a request that its pool cannot serve to the fallback pool, before the client has received a token.

    admit, choose, attempt ── error ──► `after`: a failure of the pool, and another pool? ──► renamed ──► admit, ...
                                             └── no ──► the error is the answer

Failures of a pool are: no usable replica, a full queue, a time-out in the queue, and attempts that all failed or were refused.
Errors of the client or of the gateway are not. After failed attempts, `attempts.py` looks for another pool, so that no refusal
reaches the client and the retry budget is respected. A request for an object that only one replica has stays in its pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.config.live import Live
from gateway.errors import REPLICA_FAILED, GatewayError, no_replica
from gateway.features.fallback_pools.chain import chained, foreseen, next_pool
from gateway.features.fallback_pools.metrics import FallbackMetrics
from gateway.features.fallback_pools.renaming import rename
from gateway.fleet.directory import Fleet, Target
from gateway.parser.parsing import Parsing
from gateway.request.exchange import Exchange
from gateway.request.extensions import FallbackRoute
from gateway.request.phases.scopes import scope_of
from gateway.request.slots import Slot
from router import Outcome

NO_REPLICA: Final = "no_replica_available"
_REASONS: Final[Mapping[str, str]] = {
    NO_REPLICA: "no_replica",
    "overloaded": "queue_full",
    "queue_timeout": "queue_timeout",
    REPLICA_FAILED: "failed",
}
"""The code of a GatewayError -> the reason of the fallback, for the metric."""
_STAYS: Final = Slot[bool]("fallback pools")  # the request could not be renamed to the other pool's model


class Fallbacks(FallbackRoute):
    """The fallback of the request's life (`FallbackRoute`). clock: monotonic seconds."""

    def __init__(
        self, *, live: Live, fleet: Fleet, parsing: Parsing, metrics: FallbackMetrics, clock: Callable[[], float]
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._parsing = parsing
        self._metrics = metrics
        self._clock = clock

    def require_well(self, exchange: Exchange) -> None:
        if _STAYS.get(exchange.record):  # a fallback was tried, and failed at the renaming
            return
        target, now = exchange.target, self._clock()
        if not self._fleet.is_well(target, now) and self._next(exchange, target, well=True):
            raise no_replica(f"No replica of the pool {target.pool} is up with a closed circuit.", public="No replica is up.")

    def find(self, exchange: Exchange) -> Target | None:
        return self._next(exchange, exchange.target)

    async def after(self, exchange: Exchange, failed: GatewayError) -> Target | None:
        """The pool for the request after a failure. The request then names that pool's model, and its booking is closed. None:
        the failure is the answer. A request that cannot be renamed after `no_replica_available` stays in its own pool, whose
        doubtful replicas are then tried.
        """
        api, record, reason = exchange.api, exchange.record, _REASONS.get(failed.code)
        if reason is None or api.refers or exchange.binding or _STAYS.get(record):
            return None
        target = self._current(exchange)
        if target is None or target.fallback is None:
            return None
        failing = reason == _REASONS[REPLICA_FAILED]
        next_target = exchange.attempts.next_target if failing else self._next(exchange, target)
        if next_target is None:
            return None
        exchange.give_up()
        if not await self._rename(exchange, next_target):
            _STAYS.set(record, value=True)
            return target if failed.code == NO_REPLICA and target.replicas else None
        exchange.attempts.next_target = None
        exchange.attempts.drop_refusal()
        if exchange.booked:
            exchange.booking.close(Outcome(False, None, None), self._clock())
        self._metrics.fallbacks.add((target.pool, next_target.pool, reason))
        record.placement.passed += (target.pool,)
        record.placement.pool = next_target.pool
        return next_target

    async def foreseen(self, exchange: Exchange, target: Target) -> tuple[str, Target]:
        way, next_target = foreseen(self._fleet, target, self._clock())
        return (way, next_target) if await self._set_model(exchange, next_target) else ("", target)

    async def within(self, exchange: Exchange, target: Target, pool: str) -> Target | None:
        model, subject = exchange.api.model, exchange.record.subject
        found = chained(self._fleet, target, pool)
        if found is None or not await self._set_model(exchange, found):
            return None
        if model != found.model:
            subject.alias = subject.alias or model
        return found

    def taker(self, target: Target) -> Target:
        return foreseen(self._fleet, target, self._clock())[1]

    def _next(self, exchange: Exchange, target: Target, *, well: bool = False) -> Target | None:
        """The pool after `target` that the caller may use."""
        passed, grant = exchange.record.placement.passed, exchange.caller.grant
        if grant is not None and grant.pools:
            passed += tuple([pool.name for pool in self._fleet.pools if not grant.allows_pool(pool.name)])
        return next_pool(self._fleet, target, passed, self._clock(), well=well)

    def _current(self, exchange: Exchange) -> Target | None:
        """The target that could not serve the request."""
        api, record = exchange.api, exchange.record
        if record.placement.passed:
            return self._fleet.target_in(record.placement.pool, api.model, record.subject.label)
        try:
            return self._fleet.target(api.model)
        except GatewayError:  # no pool serves this model
            return None

    async def _rename(self, exchange: Exchange, next_target: Target) -> bool:
        """Renames the request to the model of that pool. False: it could not be renamed."""
        model, record = exchange.api.model, exchange.record
        try:
            if not await self._set_model(exchange, next_target):
                return False
        except GatewayError:  # for example no memory to parse it again; the original failure is the better answer
            return False
        if model != next_target.model:
            record.subject.alias = record.subject.alias or model
        return True

    async def _set_model(self, exchange: Exchange, next_target: Target) -> bool:
        """Renames as `_rename` does, but leaves the record alone. Raises GatewayError."""
        api = exchange.api
        if next_target.model == api.model:
            return True
        scope = scope_of(self._live, exchange.caller)
        return await rename(self._parsing, exchange.dialect, exchange.request, api, next_target.model, scope)
