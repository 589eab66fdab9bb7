"""The decision for a request: one synchronous step of the router, with its booking."""

from __future__ import annotations

from collections.abc import Callable

from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.dialect import Dialect
from gateway.dialects.salts import require_saltable, tenant_salt
from gateway.features.diagnostics.diagnoses import Diagnoses
from gateway.features.histories.histories import Turn
from gateway.features.live_page.requests import LiveRequests
from gateway.features.savings.counterfactual import Counterfactual
from gateway.features.tracing.trace import CHOOSE, Choice
from gateway.fleet.directory import Fleet, Target
from gateway.request.client import Caller, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.scopes import prompt_of
from gateway.request.record import SettledRequest
from gateway.telemetry.metrics import Metrics
from router import Booking, Router


class Choosing:
    """See the top of this file. clock: monotonic seconds, the router's. counterfactual: follows each decision, if wanted;
    watch: shows them, while somebody watches.
    """

    def __init__(
        self,
        live: Live,
        fleet: Fleet,
        router: Router,
        objects: ReplicaObjects,
        diagnoses: Diagnoses,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._fleet = fleet
        self._router = router
        self._objects = objects
        self._diagnoses = diagnoses
        self._metrics = metrics
        self._clock = clock
        self.counterfactual: Counterfactual | None = None
        self.watch: LiveRequests | None = None

    def choose(
        self,
        request: ClientRequest,
        dialect: Dialect,
        api: ApiRequest,
        target: Target,
        caller: Caller,
        record: SettledRequest,
        turn: Turn | None,
    ) -> Exchange:
        """Raises GatewayError 400 if the body cannot get its tenant's salt, but may need it."""
        record.enter(CHOOSE, self._clock)
        salt = b""
        if self._live.isolates_tenants:
            if not api.metered:  # else it was parsed as a JSON object
                require_saltable(api.body, request.headers.get("Content-Type") or "")
            salt = tenant_salt(caller.tenant, api.salt)
        booking = self._book(dialect, api, target, caller, request.lease.account.client, record)
        exchange = Exchange(request, dialect, api, target, booking, record)
        exchange.salt, exchange.turn = salt, turn
        if api.diagnosis:
            self._diagnoses.begin(exchange, caller, self._clock())
        return exchange

    def _book(
        self, dialect: Dialect, api: ApiRequest, target: Target, caller: Caller, address: str, record: SettledRequest
    ) -> Booking:
        begun = self._clock()
        prompt = prompt_of(self._live, api, caller, target.label, caller.number(address))
        live = self._fleet.candidates(target, begun)
        if api.refers and (known := self._objects.find(api.refers, caller)) and known[0] in live:
            live = [known[0]]  # no other one has it
        elif dialect.lacking:
            live = self._fleet.able(target, dialect.name, begun) or live  # else the first attempt ends it
        watch = self.watch
        watched = watch is not None and watch.on and watch.wants(record, begun)
        ranking = self._router.rank(prompt, live, begun)[1] if watched or record.trace is not None else None
        booking = self._router.choose(prompt, live, begun, silent=not (api.metered and api.stream and api.countable))
        decision = booking.decision
        self._metrics.routing_seconds.observe((), self._clock() - begun)
        self._metrics.routing.add((self._router.policy_name, decision.reason))
        if record.trace is not None and ranking is not None:
            record.trace.chose(Choice(self._router.policy_name, target.pool, decision, ranking))
        record.booking = booking
        if watched and watch is not None and ranking is not None:
            watch.chose(record, self._router.policy_name, target.pool, decision, ranking)
        if api.outline:
            record.outline = api.outline
        if api.salt:
            record.salt = api.salt
        record.reason = decision.reason
        record.estimated_prompt_tokens = decision.prompt_tokens
        if self.counterfactual is not None and record.metered and record.placed is None:
            record.placed = self.counterfactual.choose(prompt, live, booking.chosen.replica, decision.prompt_tokens, begun)
        return booking
