"""Choice of a replica: one synchronous step of the router, with the booking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.config.live import Live
from gateway.dialects.salts import require_saltable, tenant_salt
from gateway.dialects.table import computes
from gateway.fleet.directory import Fleet
from gateway.parser.parsing import SMALL_BYTES
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.notes import CHOOSE
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.scopes import prompt_of
from gateway.telemetry.metrics import Metrics
from gateway.turns import turns_of
from router import Router


class ChoosePhase:
    """The phase choose (see the module). clock: monotonic seconds, the router's."""

    def __init__(
        self,
        live: Live,
        fleet: Fleet,
        router: Router,
        objects: ReplicaObjects,
        extensions: Extensions,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._router = router
        self._objects = objects
        self._extensions = extensions
        self._metrics = metrics
        self._clock = clock

    def choose(self, exchange: Exchange) -> None:
        """Book a replica. Raises GatewayError 400 if the body may need its tenant's salt but cannot have it, and features'
        errors.
        """
        api, caller = exchange.api, exchange.caller
        if exchange.notes is not None:
            exchange.notes.enter(CHOOSE, self._clock())
        if self._live.isolates_tenants:
            if not api.metered:  # else it was parsed as a JSON object
                require_saltable(api.body, exchange.request.headers.get("Content-Type") or "")
            exchange.salt = tenant_salt(caller.tenant, api.salt)
        begun = self._clock()
        target, record = exchange.target, exchange.record
        prompt = prompt_of(self._live, api, caller, target.label, exchange.request.lease.account.client)
        if not (api.metered or computes(record.subject.endpoint, exchange.request.method)):
            prompt.units = 0
        live = self._fleet.candidates(target, begun)
        if api.refers and (known := self._objects.find(api.refers, caller)) and known[0] in live:
            live = [known[0]]  # no other replica has the object
        elif exchange.dialect.lacking:
            live = self._fleet.able(target, exchange.dialect.name, begun) or live  # if empty, the first attempt fails
        elif spared := self._fleet.spared(target, begun, live):
            holder = self._router.holder(prompt, [*live, *spared], begun)
            live = [*live, holder] if holder in spared else live
        extensions = self._extensions
        explainers = [each for each in extensions.explainers if each.wants(exchange, begun)] if extensions.explainers else None
        ranking = self._router.rank(prompt, live, begun)[1] if explainers else None
        timed = api.metered and api.stream and api.countable and not api.images  # engines encode images before the prefill
        booking = self._router.choose(prompt, live, begun, silent=not timed)
        decision = booking.decision
        took_s = self._clock() - begun
        self._metrics.routing_seconds.observe((), took_s)
        if len(api.body) > SMALL_BYTES:  # most of it for the block keys
            turns_of(asyncio.get_running_loop()).charge(exchange.request.lease.account.client, took_s)
        self._metrics.routing.add((self._router.policy_name, decision.reason))
        exchange.book(booking)
        record.placement.reason = decision.reason
        record.placement.estimated_prompt_tokens = decision.prompt_tokens
        if explainers and ranking is not None:
            for explainer in explainers:
                explainer.explain(exchange, self._router.policy_name, ranking)
        for chosen in extensions.chosen:
            chosen(exchange, live, begun)
