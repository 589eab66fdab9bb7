"""What becomes of a request that its pool cannot serve: it goes on in the pool of the fallback, before the client has seen
anything.

    admit, choose, attempt ── error ──► `after`: is it the pool's failure? is there another one? ──► renamed ──► admit, ...
                                             └── no ──► the error is the answer

Failures of a pool are: no replica that can be used, a full queue, a wait in the queue that took too long, and attempts that all
failed or were refused. A client's error is none, nor is a lack of the gateway's own. After failed attempts it is `attempts.py`
that looks for another pool, for then no refusal goes to the client, and the retry budget is asked. A request about an object
that only one replica has stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from gateway.config.live import Live
from gateway.errors import GatewayError, no_replica
from gateway.features.fallback_pools.chain import foreseen, next_pool
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
REPLICA_FAILED: Final = "replica_failed"
_REASONS: Final[Mapping[str, str]] = {
    NO_REPLICA: "no_replica",
    "overloaded": "queue_full",
    "queue_timeout": "queue_timeout",
    REPLICA_FAILED: "failed",
}
"""Of a GatewayError's code: the reason of a fallback."""
_STAYS: Final = Slot[bool]("fallback pools")  # it could not be given the name that another pool has for its model


class Fallbacks(FallbackRoute):
    """See the top of this file. clock: monotonic seconds."""

    def __init__(
        self, *, live: Live, fleet: Fleet, parsing: Parsing, metrics: FallbackMetrics, clock: Callable[[], float]
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._parsing = parsing
        self._metrics = metrics
        self._clock = clock

    def require_well(self, exchange: Exchange) -> None:
        if _STAYS.get(exchange.record):  # there is no better place for it
            return
        target, now = exchange.target, self._clock()
        if not self._fleet.is_well(target, now) and self._next(exchange, target, well=True):
            raise no_replica(f"No replica of the pool {target.pool} is up with a closed circuit.", public="No replica is up.")

    def find(self, exchange: Exchange) -> Target | None:
        return self._next(exchange, exchange.target)

    async def after(self, exchange: Exchange, failed: GatewayError) -> Target | None:
        """It names the model of that pool now, and its former booking is closed; or where it was, on replicas in doubt, if it
        cannot be given that name.
        """
        api, record, reason = exchange.api, exchange.record, _REASONS.get(failed.code)
        if reason is None or api.refers or _STAYS.get(record):
            return None
        target = self._current(exchange)
        if target is None or target.fallback is None:
            return None
        failing = reason == _REASONS[REPLICA_FAILED]
        further = exchange.attempts.next_target if failing else self._next(exchange, target)
        if further is None:
            return None
        exchange.give_up()
        if not await self._renamed(exchange, further):
            _STAYS.set(record, value=True)
            return target if failed.code == NO_REPLICA and target.replicas else None
        exchange.attempts.next_target = None
        exchange.attempts.drop_refusal()
        if exchange.booked:
            exchange.booking.close(Outcome(False, None, None), self._clock())
        self._metrics.fallbacks.add((target.pool, further.pool, reason))
        record.placement.passed += (target.pool,)
        record.placement.pool = further.pool
        return further

    async def foreseen(self, exchange: Exchange, target: Target) -> tuple[str, Target]:
        way, further = foreseen(self._fleet, target, self._clock())
        return (way, further) if await self._named(exchange, further) else ("", target)

    def taker(self, target: Target) -> Target:
        return foreseen(self._fleet, target, self._clock())[1]

    def _next(self, exchange: Exchange, target: Target, *, well: bool = False) -> Target | None:
        """The pool after that of `target` which the caller may use."""
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

    async def _renamed(self, exchange: Exchange, further: Target) -> bool:
        """Whether the request names the model of that pool."""
        former, record = exchange.api.model, exchange.record
        try:
            if not await self._named(exchange, further):
                return False
        except GatewayError:  # no room to parse it again, say: the failure that it was is the better answer
            return False
        if former != further.model:
            record.subject.alias = record.subject.alias or former
        return True

    async def _named(self, exchange: Exchange, further: Target) -> bool:
        """The same, without a trace of it in the record. Raises GatewayError."""
        api = exchange.api
        if further.model == api.model:
            return True
        scope = scope_of(self._live, exchange.caller)
        return await rename(self._parsing, exchange.dialect, exchange.request, api, further.model, scope)
