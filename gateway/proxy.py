"""One request's life: choose, send, fail over, pass the answer on, close the lease, meter, log.

    read -> parse -> admit -> choose ──► attempt ──► first byte ──► bytes to the client ──► close, meter, log
                                 ▲          │ fails before its first byte (failover.py)
                                 └── move ◄─┘ to the best of the others

Nothing goes to the client before the first byte of the replica's answer is here (the whole answer, if it is not a stream),
so an attempt that fails until then is invisible: the lease moves on. After that an error can only be told inside the stream.
The lease is closed in one `finally`, whatever happens, the client's leaving included (its handler is cancelled).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from gateway.answers import Answers
from gateway.api import openai
from gateway.config import RoutingConfig
from gateway.exchange import Exchange, Headers, Request
from gateway.failover import Failover
from gateway.metering import Meter
from gateway.metrics import Metrics
from gateway.record import Record
from gateway.replicas import Fleet, Target
from gateway.reply import Reply
from router import Booking, Outcome, Prompt, Router, seed, text_keys, token_keys

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
        """A request's prompt for the router, seeded so that models and cache salts never match each other.

        label: the model's bounded name. client: who asks (`client_of`).
        """
        routing, name, session = self.routing, seed(api.model, api.salt), _session(headers)
        if api.prompt is None:
            return Prompt(b"", 0, routing.block_bytes, label, session, client)
        if isinstance(api.prompt, bytes):
            keys = text_keys(api.prompt, routing.block_bytes, name)
            return Prompt(keys, len(api.prompt), routing.block_bytes, label, session, client)
        keys = token_keys(api.prompt, routing.block_tokens, name)
        return Prompt(keys, len(api.prompt), routing.block_tokens, "", session, client)

    async def forward(self, request: Request, api: openai.ApiRequest, record: Record) -> Reply:
        """Answer a parsed request from a replica. Raises GatewayError when none could answer."""
        record.model = api.model
        target = self.fleet.target(api.model)
        record.label = target.label
        target.require()
        permit = target.admission.try_admit()
        if permit is None:
            permit = await target.wait(record.tenant, request.headers.get(PRIORITY_HEADER))
            target = self.fleet.target(api.model)  # while it waited, replicas may have come and gone
        try:
            target.require()
            return await self._forward(Exchange(request, api, target, self._choose(request, api, target, record), record))
        finally:
            permit.release()

    async def _forward(self, exchange: Exchange) -> Reply:
        ok, record = False, exchange.record
        try:
            attempt = await self.failover.first_answer(exchange)
            try:
                answer = await self.answers.pass_on(exchange, attempt)
            finally:
                attempt.close()
            ok = exchange.complete = attempt.status < 400 and not record.error
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
        prompt = self.prompt(api, request.headers, target.label, client_of(request, record.tenant))
        live = self.fleet.candidates(target, begun)
        if not live:
            raise self.fleet.all_rest(target, begun)
        booking = self.router.choose(prompt, live, begun, silent=not (api.metered and api.stream))
        decision = booking.decision
        self.metrics.routing_seconds.observe((), self.clock() - begun)
        self.metrics.routing.add((self.router.policy_name, decision.reason))
        record.reason = decision.reason
        record.estimated_prompt_tokens = decision.prompt_tokens
        return booking

    def _close(self, exchange: Exchange, ok: bool) -> None:
        usage, booking, record = exchange.record.usage, exchange.booking, exchange.record
        outcome = Outcome(ok, usage.prompt if usage else None, usage.cached if usage else None)
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


def client_of(request: Request, tenant: str) -> int:
    """Who asks, as far as that shows: by its key and tenant, without a key by its address too.

    Where nobody checks keys, a client may pass for several.
    """
    who = request.headers.get("Authorization")
    if not who and request.transport:
        peer = request.transport.get_extra_info("peername")
        who = str(peer[0]) if isinstance(peer, tuple) else ""
    return xxhash.xxh3_64_intdigest(f"{tenant}\0{who}".encode("utf-8", "surrogatepass"))


def _session(headers: Headers) -> str:
    """The conversation that the client names, if it does; no header is worth a long name."""
    return (headers.get("X-Session-Id") or headers.get("X-Correlation-Id") or "")[:256]
