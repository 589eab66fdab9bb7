"""Where a request may go, and a slot there; and where it goes on when its pool cannot serve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.admission.pool_queue import Permit
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.table import BATCHES, OTHER_ENDPOINT
from gateway.errors import GatewayError, named_model
from gateway.features.fallback_pools.fallbacks import Fallbacks
from gateway.features.keys.grant import Grant
from gateway.features.keys.limiting import Limiting
from gateway.features.tracing.trace import ADMIT
from gateway.fleet.directory import Fleet, Target
from gateway.request.client import Caller, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of, scope_of
from gateway.request.record import SettledRequest
from gateway.telemetry.metrics import Metrics

PRIORITY_HEADER: Final = "X-Priority"
NOT_FOUND: Final = 404


class Admitting:
    """See the top of this file. clock: monotonic seconds."""

    def __init__(
        self,
        live: Live,
        fleet: Fleet,
        fallbacks: Fallbacks,
        limiting: Limiting,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._fallbacks = fallbacks
        self._limiting = limiting
        self._metrics = metrics
        self._clock = clock

    async def admit(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, record: SettledRequest, further: Target | None
    ) -> tuple[Target, Permit]:
        """Where the request may go, and a slot there. further: after a fallback. Raises GatewayError 4xx or 503."""
        record.enter(ADMIT, self._clock)
        record.model, grant = api.model, caller.grant
        if grant is not None and further is None:
            # A replica's own run in the background (`stores`) has no usage yet; what a session has used is counted at its end.
            counted = (api.metered and not api.stores) or not record.generates or request.upgrades
            known = record.endpoint != OTHER_ENDPOINT and record.endpoint not in BATCHES
            grant.require_endpoint(record.path, known=known, counted=counted)
            grant.require_model(api.model)
        target = self._fleet.renewed(further) if further else self._target(api, grant)
        record.label = target.label
        if grant is not None and further is None:
            self._enter(grant, target, record)
        target.require()
        if target.fallback is not None and not api.refers:
            self._fallbacks.require_well(target, record)
        permit = target.admission.try_admit()
        if permit is not None:
            return target, permit
        prompt_of(self._live, api, caller, target.label)  # so that only its block keys are in memory while it waits
        permit = await self._queue(request, record, target, grant.priority if grant else None)
        try:  # meanwhile replicas may have come and gone, and the model with them
            target = self._fleet.renewed(target) if target.named else self._fleet.target(api.model, api.alias)
            target.require()
            if grant is not None:
                self._limiting.require_valid(grant)
        except GatewayError:
            permit.release()
            raise
        return target, permit

    def _target(self, api: ApiRequest, grant: Grant | None) -> Target:
        """Raises GatewayError 404, with the names of other models for those who may use them."""
        try:
            return self._fleet.target(api.model, api.alias)
        except GatewayError as error:
            if grant is None or not (grant.models or grant.pools) or error.status != NOT_FOUND:
                raise
            text = f"{named_model(api.model, api.alias)} does not exist here."
            raise GatewayError(NOT_FOUND, error.code, text, param="model") from None

    async def _queue(self, request: ClientRequest, record: SettledRequest, target: Target, most: int | None) -> Permit:
        """A slot, after a wait for it. most: the highest priority it may have. Raises GatewayError 400 or 429."""
        begun = self._clock()
        try:
            return await target.wait(record.tenant, request.headers.get(PRIORITY_HEADER), most)
        finally:
            waited_s = self._clock() - begun
            record.queued_s += waited_s
            self._metrics.queue_seconds.observe((target.pool,), waited_s)

    def _enter(self, grant: Grant, target: Target, record: SettledRequest) -> None:
        """Raises GatewayError 403 or 429."""
        grant.require_pool(target.pool)
        if grant.pools:
            record.barred = tuple([pool.name for pool in self._fleet.pools if pool.name not in grant.pools])
        self._limiting.enter(grant, record)

    async def further(
        self,
        request: ClientRequest,
        dialect: Dialect,
        api: ApiRequest,
        caller: Caller,
        record: SettledRequest,
        failed: GatewayError,
        exchange: Exchange | None,
    ) -> Target | None:
        """Where the request goes on that has failed so. None: nowhere."""
        scope = scope_of(self._live, caller)
        return await self._fallbacks.after(failed.code, request, dialect, api, scope, record, exchange)
