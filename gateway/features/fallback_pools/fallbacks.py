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

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.errors import GatewayError, no_replica
from gateway.features.fallback_pools.chain import next_pool
from gateway.features.fallback_pools.renaming import rename
from gateway.fleet.directory import Fleet, Target
from gateway.parser.parsing import Parsing
from gateway.request.client import ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.telemetry.metrics import Metrics
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


class Fallbacks:
    """See the top of this file. clock: monotonic seconds."""

    def __init__(self, *, fleet: Fleet, parsing: Parsing, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._parsing = parsing
        self._metrics = metrics
        self._clock = clock

    def require_well(self, target: Target, record: SettledRequest) -> None:
        """Raises GatewayError 503 if no replica of this target is well, and one of a fallback is."""
        if record.stays:  # there is no better place for it
            return
        now = self._clock()
        if not self._fleet.is_well(target, now) and next_pool(
            self._fleet, target, (*record.passed, *record.barred), now, well=True
        ):
            raise no_replica(f"No replica of the pool {target.pool} is up with a closed circuit.", public="No replica is up.")

    async def after(
        self,
        code: str,
        request: ClientRequest,
        dialect: Dialect,
        api: ApiRequest,
        scope: tuple[str, ...],
        record: SettledRequest,
        exchange: Exchange | None,
    ) -> Target | None:
        """Where the request goes on: it names the model of that pool now, and its former booking is closed; or where it was, on
        replicas in doubt, if it cannot be given that name. None: the error is the answer.

        code: the error's. scope: seeds the block keys. exchange: the one that has failed, or one before it.
        """
        reason = _REASONS.get(code)
        if reason is None or api.refers or record.stays:
            return None
        target = self._current(api, record)
        if target is None or target.fallback is None:
            return None
        if reason == _REASONS[REPLICA_FAILED]:
            further = exchange.attempts.elsewhere if exchange is not None else None
        else:
            further = next_pool(self._fleet, target, (*record.passed, *record.barred), self._clock())
        if further is None:
            return None
        if exchange is not None:
            exchange.give_up()
        if not await self._renamed(request, dialect, api, scope, record, further):
            record.stays = True
            return target if code == NO_REPLICA and target.replicas else None
        if exchange is not None:
            exchange.attempts.elsewhere = None
            exchange.attempts.drop_refusal()
            exchange.booking.close(Outcome(False, None, None), self._clock())
            record.failed_attempts, record.sent = exchange.attempts.failed, exchange.attempts.sent
        self._metrics.fallbacks.add((target.pool, further.pool, reason))
        record.passed += (target.pool,)
        record.pool = further.pool
        return further

    def _current(self, api: ApiRequest, record: SettledRequest) -> Target | None:
        """The target that could not serve the request."""
        if record.passed:
            return self._fleet.target_in(record.pool, api.model, record.label)
        try:
            return self._fleet.target(api.model)
        except GatewayError:  # no pool serves this model
            return None

    async def _renamed(
        self,
        request: ClientRequest,
        dialect: Dialect,
        api: ApiRequest,
        scope: tuple[str, ...],
        record: SettledRequest,
        further: Target,
    ) -> bool:
        """Whether the request names the model of that pool."""
        former = api.model
        if further.model == former:
            return True
        try:
            if not await rename(self._parsing, dialect, request, api, further.model, scope):
                return False
        except GatewayError:  # no room to parse it again, say: the failure that it was is the better answer
            return False
        record.alias = record.alias or former
        return True
