"""One request's life: choose, send, fail over, pass the answer on, close the lease, meter, log.

    read -> parse -> admit -> choose ──► attempt ──► first byte ──► bytes to the client ──► close, meter, log
                                 ▲          │ fails before its first byte (failover.py)
                                 └── move ◄─┘ to the best of the others

Nothing goes to the client before the first byte of the replica's answer is here (of a plain answer to a generation, its first
MiB), so an attempt that fails until then is invisible: the lease moves on. After that an error can only be told inside the
stream.
The lease is closed in one `finally`, whatever happens, the client's leaving included (its handler is cancelled).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.answers import Answers
from gateway.api import openai
from gateway.config import TENANT, RoutingConfig
from gateway.exchange import Exchange, Headers, Request, require_saltable, tenant_salt
from gateway.failover import Failover
from gateway.metering import Meter
from gateway.metrics import Metrics
from gateway.outgoing import client_of
from gateway.record import TENANT_HEADER, Record
from gateway.replicas import Fleet, Target
from gateway.reply import Reply
from router import Booking, Outcome, Prompt, Router

PRIORITY_HEADER = "X-Priority"


@dataclass(slots=True, eq=False, kw_only=True)
class Proxy:
    """Forwards requests. `clock` is monotonic seconds, the same for the router and for all durations."""

    routing: RoutingConfig
    fleet: Fleet
    router: Router
    failover: Failover
    meter: Meter
    metrics: Metrics
    answers: Answers
    clock: Callable[[], float]

    def prompt(self, api: openai.ApiRequest, headers: Headers, label: str, client: int = 0) -> Prompt:
        """A request's prompt for the router, seeded so that models and cache salts never match each other, nor, with
        `routing.isolation: tenant`, tenants.

        label: the model's bounded name. client: who asks (`outgoing.client_of`).
        """
        blocks = self.routing.block_bytes, self.routing.block_tokens
        return openai.router_prompt(api, blocks, label, _session(headers), client, self.scope(headers))

    def scope(self, headers: Headers) -> tuple[str, ...]:
        """Names that keep the prompts of this client apart from those of others, beside the model and the cache salt."""
        return (headers.get(TENANT_HEADER) or "",) if self.routing.isolation == TENANT else ()

    async def forward(self, request: Request, api: openai.ApiRequest, record: Record) -> Reply:
        """Answer a parsed request from a replica. Raises GatewayError when none could answer."""
        record.model = api.model
        target = self.fleet.target(api.model)
        record.label = target.label
        target.require()
        permit = target.admission.try_admit()
        waits = permit is None
        if permit is None:
            self.prompt(api, request.headers, target.label)  # so that only its block keys are in memory while it waits
            permit = await target.wait(record.tenant, request.headers.get(PRIORITY_HEADER))
        try:
            if waits:  # meanwhile replicas may have come and gone, and the model with them
                target = self.fleet.target(api.model)
                target.require()
            salt = self._salt(request, api) if self.routing.isolation == TENANT else b""
            exchange = Exchange(request, api, target, self._choose(request, api, target, record), record)
            exchange.salt = salt
            return await self._forward(exchange)
        finally:
            permit.release()

    def _salt(self, request: Request, api: openai.ApiRequest) -> bytes:
        """The cache salt of this request's tenant. Raises GatewayError 400 if the body cannot get one, but may need it."""
        if not api.metered:  # else it was parsed as a JSON object
            require_saltable(api.body, request.headers.get("Content-Type") or "")
        return tenant_salt(request.headers.get(TENANT_HEADER) or "", api.salt)

    async def _forward(self, exchange: Exchange) -> Reply:
        ok, record = False, exchange.record
        try:
            attempt = await self.failover.first_answer(exchange)
            if not (exchange.target.resume_streams and exchange.api.stream):
                exchange.drop_body(attempt)  # it is answered; only a stream that is resumed would be asked for again
            try:
                answer = await self.answers.pass_on(exchange, attempt)
            finally:
                attempt.close()
            ok = exchange.complete = attempt.status < 400 and not record.error
            if ok:
                self.failover.completed(exchange)
            return answer
        except (asyncio.CancelledError, ConnectionError):
            # The client left. What the replica has prefilled by then it does hold.
            ok = exchange.booking.lease.decoding
            raise
        except Exception:
            if exchange.reply and exchange.reply.begun:
                exchange.reply.cut()  # a bug: nothing sane can follow what went out
            raise
        finally:
            self._close(exchange, ok)

    def _choose(self, request: Request, api: openai.ApiRequest, target: Target, record: Record) -> Booking:
        begun = self.clock()
        prompt = self.prompt(api, request.headers, target.label, client_of(request))
        live = self.fleet.candidates(target, begun)
        booking = self.router.choose(prompt, live, begun, silent=not (api.metered and api.stream and api.countable))
        decision = booking.decision
        self.metrics.routing_seconds.observe((), self.clock() - begun)
        self.metrics.routing.add((self.router.policy_name, decision.reason))
        record.reason = decision.reason
        record.estimated_prompt_tokens = decision.prompt_tokens
        return booking

    def _close(self, exchange: Exchange, ok: bool) -> None:
        usage, booking, record = exchange.record.usage, exchange.booking, exchange.record
        counted = usage if exchange.api.countable else None
        outcome = Outcome(ok, counted.prompt if counted else None, counted.cached if counted else None)
        replica, predicted = booking.chosen.replica, booking.chosen.matched_tokens
        if booking.close(outcome, self.clock()):
            self.fleet.zero_hits(replica)
        if not exchange.api.metered or record.status != 200:
            return
        self.metrics.predicted_cached.add((record.label, replica), predicted)
        self.metrics.available_cached.add((record.label,), booking.decision.available_tokens)
        if usage:
            self.fleet.metered(replica, predicted, usage.cached)
            bill = self.meter.bill(record.model, usage)
            self.meter.count(usage, bill, model=record.label, replica=replica, tenant=record.tenant)
            record.bill = bill
        elif exchange.complete:
            self.metrics.unmetered.add((record.label,))


def _session(headers: Headers) -> str:
    """The conversation that the client names, if it does; no header is worth a long name."""
    return (headers.get("X-Session-Id") or headers.get("X-Correlation-Id") or "")[:256]
