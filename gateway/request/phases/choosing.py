"""Choice of a replica: one synchronous step of the router, with the booking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

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
from gateway.shares import QUICK_S
from gateway.telemetry.metrics import Metrics
from gateway.turns import turns_of
from router import Prompt, Router


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
        prompt = prompt_of(self._live, api, caller, target.label, exchange.request.lease.account.client, target.adapter_of(api))
        if not (api.metered or computes(record.subject.endpoint, exchange.request.method)):
            prompt.units, prompt.adapter = 0, ""
        live = self._candidates(exchange, prompt, begun)
        extensions = self._extensions
        explainers = [each for each in extensions.explainers if each.wants(exchange, begun)] if extensions.explainers else None
        ranking = self._router.rank(prompt, live, begun)[1] if explainers else None
        timed = api.metered and api.stream and api.countable and not api.images  # engines encode images before the prefill
        booking = self._router.choose(prompt, live, begun, silent=not timed)
        decision = booking.decision
        took_s = self._clock() - begun
        self._metrics.routing_seconds.observe((), took_s)
        if took_s > QUICK_S and len(api.body) > SMALL_BYTES:  # most of it for the block keys
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

    def again(self, exchange: Exchange) -> None:
        """Choose again for a request that was not sent yet: what decided the first time has changed."""
        now, booking, placement = self._clock(), exchange.booking, exchange.record.placement
        target = self._fleet.renewed(exchange.target)
        if not target.replicas:
            return  # the attempt fails
        exchange.target = target
        if live := self._candidates(exchange, booking.prompt, now):
            booking.move(live, now)
        placement.reason, placement.estimated_prompt_tokens = booking.decision.reason, booking.decision.prompt_tokens

    def _candidates(self, exchange: Exchange, prompt: Prompt, now: float) -> Collection[str]:
        """The replicas to choose from."""
        api, target = exchange.api, exchange.target
        live = self._fleet.candidates(target, now)
        if api.refers and (known := self._objects.find(api.refers, exchange.caller)) and known[0] in live:
            return [known[0]]  # no other replica has the object
        if exchange.dialect.lacking:
            return self._fleet.able(target, exchange.dialect.name, now) or live  # if empty, the first attempt fails
        if spared := self._fleet.spared(target, now, live):
            holder = self._router.holder(prompt, [*live, *spared], now)
            return [*live, holder] if holder in spared else live
        return live
