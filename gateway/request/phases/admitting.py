"""Admission: the replicas for a request, and a slot there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.admission.pool_queue import Permit, Place
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import BATCHES, OTHER_ENDPOINT, generates
from gateway.errors import GatewayError, named_model
from gateway.fleet.directory import Fleet, Target
from gateway.request.exchange import Exchange, PoolBinding
from gateway.request.extensions import Extensions
from gateway.request.notes import ADMIT
from gateway.request.phases.scopes import prompt_of, sequences_of
from gateway.request.priority import PRIORITY_HEADER
from gateway.request.pulses import is_pulsed
from gateway.request.rights import Rights
from gateway.telemetry.metrics import Metrics

NOT_FOUND: Final = 404
_UNLISTED: Final = BATCHES | {OTHER_ENDPOINT}


class AdmitPhase:
    """The phase admit (see the module). clock: monotonic seconds."""

    def __init__(self, live: Live, fleet: Fleet, extensions: Extensions, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._live = live
        self._fleet = fleet
        self._extensions = extensions
        self._metrics = metrics
        self._clock = clock

    async def admit(self, exchange: Exchange, further: Target | None) -> None:
        """Set the request's target, and wait for a slot. further: the target of a fallback. Raises GatewayError 4xx or 503."""
        api, record, grant = exchange.api, exchange.record, exchange.caller.grant
        if exchange.notes is not None:
            exchange.notes.enter(ADMIT, self._clock())
        record.subject.model = api.model
        if grant is not None and further is None:
            _check_rights(exchange, grant)
        target = self._fleet.renewed(further) if further else self._target(api, grant)
        if exchange.binding is not None:
            target = await self._bound(exchange, target, exchange.binding)
        exchange.target = target
        record.subject.label = target.label
        extensions = self._extensions
        if further is None:
            if grant is not None:
                grant.require_pool(target.pool)
            for enter in extensions.entering:
                enter(exchange)
            if exchange.request.upgrades:
                for upgrade in extensions.upgrading:
                    upgrade(exchange)
        target.require()
        if target.fallback is not None and extensions.fallback is not None and not (api.refers or exchange.binding):
            extensions.fallback.require_well(exchange)
        exchange.permit = target.admission.try_admit(sequences_of(api))
        if exchange.permit is not None:
            return
        prompt = prompt_of(self._live, api, exchange.caller, target.label)  # a waiting request holds only its block keys
        work_s = self._fleet.work_s(target, prompt, self._clock())
        exchange.permit = await self._queue(exchange, grant.priority if grant else None, work_s)
        # During the wait replicas may have come and gone, and the model with them.
        exchange.target = self._fleet.renewed(target) if target.named else self._fleet.target(api.model, api.alias)
        exchange.target.require()
        for wait_over in extensions.waited:
            wait_over(exchange)

    def _target(self, api: ApiRequest, grant: Rights | None) -> Target:
        """The model's target. Raises GatewayError 404, which lists other models only for callers without restrictions."""
        try:
            return self._fleet.target(api.model, api.alias)
        except GatewayError as error:
            if grant is None or not (grant.models or grant.pools) or error.status != NOT_FOUND:
                raise
            text = f"{named_model(api.model, api.alias)} does not exist here."
            raise GatewayError(NOT_FOUND, error.code, text, param="model") from None

    async def _bound(self, exchange: Exchange, target: Target, binding: PoolBinding) -> Target:
        """The target in the only pool that may serve the request: its model's own pool, or one of that pool's fallbacks. In the
        first pool that it goes to, if the binding is not strict.

        Raises GatewayError.
        """
        fallback = self._extensions.fallback
        found: Target | None = None
        if not binding.strict:
            exchange.binding = None
            first = self._fleet.target_in(binding.pool, target.model, target.label)
            if first is None or not self._fleet.is_well(first, self._clock()):
                return target
        if target.pool == binding.pool:
            found = self._fleet.target_in(target.pool, target.model, target.label)  # so that no reload leads to another pool
        elif fallback is not None:
            found = await fallback.within(exchange, target, binding.pool)
        if found is None:
            if not binding.strict:
                return target
            raise binding.refusal()
        exchange.record.subject.model = exchange.api.model
        return found

    async def _queue(self, exchange: Exchange, most: int | None, work_s: float) -> Permit:
        """Wait for a slot. most: the highest allowed priority. work_s: see `Fleet.work_s`. Raises GatewayError 400 or 429."""
        begun, record = self._clock(), exchange.record
        try:
            exchange.place = place = Place()
            header = exchange.request.headers.get(PRIORITY_HEADER)
            sequences, pulsed = sequences_of(exchange.api), is_pulsed(exchange, self._live.keepalive_s)
            return await exchange.target.wait(
                record.sender.tenant, header, most, place, sequences=sequences, pulsed=pulsed, work_s=work_s
            )
        finally:
            exchange.place = None
            waited_s = self._clock() - begun
            record.placement.queued_s += waited_s
            self._metrics.queue_seconds.observe((exchange.target.pool,), waited_s)


def _check_rights(exchange: Exchange, grant: Rights) -> None:
    """Raises GatewayError 403."""
    api, record = exchange.api, exchange.record
    # A replica's own run in the background (`stores`) has no usage yet; the answers of a session are counted as they pass. An
    # engine may compute answers to any method. A path that is still encoded may be another one to it.
    computes = generates(record.subject.endpoint, has_prompt=api.has_prompt)
    metered = (api.metered and not api.stores) or not computes or exchange.request.upgrades
    listed = record.subject.endpoint not in _UNLISTED and "%" not in record.path
    grant.require_endpoint(record.path, listed=listed, metered=metered)
    grant.require_models_of(api)
