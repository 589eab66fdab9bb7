"""One request's life, in phases.

    identify ─► parse ─► admit ─► choose ─► attempt ─► deliver ─► settle
       │405       │400      │400     │400       │502       │ event     always, once: the observers of settle.py
       │508       │408 413  │404     │          │503       │ or cut
       │          │415 503  │429 503 │          │          │
       └──────────┴─────────┴────────┴──────────┴──► the error's answer, in the dialect's shape
                            ▲        ▲          │ fails before its first byte: another replica (attempts.py)
                            │        └── move ──┤
                            └─── another pool ──┘ for a failure of the pool, where it has a fallback (fallback/)

- identify: who sends it, under which id, in which dialect; whether it has passed this gateway before.
- parse: its body, read and understood.
- admit: the replicas that serve its model, and a slot there, at once or after a wait in the pool's queue.
- choose: one synchronous decision of the router, with its booking.
- attempt: until the first byte of an answer. Nothing has gone to the client yet, so what fails is invisible to it.
- deliver: the answer to the client. From here on an error can only be an event of the stream.
- settle: the record is complete, and the observers get it. The booking is closed whatever has happened, the client's leaving
  included (its handler is cancelled).

Attempts and delivery keep what they have found in logs of their own (`exchange.py`); only this file writes the record. A
request and its reply are whatever implements `request/client.py`; there is no socket here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.admission.cors import answer_lines
from gateway.admission.memory import parsing
from gateway.admission.pool_queue import Permit
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest, router_prompt
from gateway.dialects.dialect import Dialect
from gateway.dialects.salts import require_saltable, tenant_salt
from gateway.dialects.table import Dialects, generates
from gateway.errors import GatewayError, internal_error, shutting_down
from gateway.fleet.directory import Fleet, Target
from gateway.parser.parsing import Parsing
from gateway.request.attempts import Attempts
from gateway.request.background.following import Following
from gateway.request.client import REQUEST_ID_HEADER, Audience, Caller, ClientReply, ClientRequest
from gateway.request.delivery import Delivery
from gateway.request.exchange import Exchange
from gateway.request.fallback.chain import foreseen
from gateway.request.fallback.fallbacks import Fallbacks
from gateway.request.fallback.renaming import find_outside
from gateway.request.kept.diagnoses import Diagnoses
from gateway.request.kept.recall import Recall, charge_to
from gateway.request.record import CLIENT_LEFT, SettledRequest, request_id, tenant_label
from gateway.request.running import Running
from gateway.request.settle import Observer, settle
from gateway.state.histories import Turn
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.http1 import SWITCHING
from gateway.upstream.loop_guard import VIA_HEADER, LoopGuard
from router import Booking, Prompt, Router, session_key

log = logging.getLogger("warmroute.gateway")

PRIORITY_HEADER: Final = "X-Priority"
OBJECT: Final = "object"  # a number of one never is that of a session
MODELS_PATH: Final = "/v1/models"
_JSON_LINE: Final = b"Content-Type: application/json\r\n"
_STREAM_LINES: Final = b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"


@dataclass(slots=True, eq=False, kw_only=True)
class Lifecycle:
    """See the top of this file. clock: monotonic seconds, the same for the router and for all durations."""

    live: Live
    dialects: Dialects
    parsing: Parsing
    fleet: Fleet
    router: Router
    attempts: Attempts
    fallbacks: Fallbacks
    delivery: Delivery
    recall: Recall
    diagnoses: Diagnoses
    observers: list[Observer]
    running: Running
    audience: Audience
    loops: LoopGuard
    metrics: Metrics
    clock: Callable[[], float]

    async def serve(self, request: ClientRequest) -> ClientReply:
        """Answer a request. Raises ConnectionError or CancelledError if the client has left; any other error is an answer."""
        record = SettledRequest(request_id(request.headers.get(REQUEST_ID_HEADER)), request.path, self.clock())
        task = self.running.enter()
        dialect = self.dialects.at(request.path)
        api: ApiRequest | None = None
        turn: Turn | None = None
        exchange: Exchange | None = None
        permit: Permit | None = None
        target: Target | None = None
        try:
            caller = self._identify(request, dialect, record)
            api = await self._parse(request, dialect, caller, record)
            if self._is_own(dialect, api) and (own := await self._own(request, dialect, api, caller, record)):
                return own
            if dialect.strict and self.recall.concerns(request, api):
                api, turn = await self._recall(request, dialect, api, caller)
            while True:
                try:
                    target, permit = await self._admit(request, api, caller, record, target)
                    exchange = self._choose(request, dialect, api, target, caller, record, turn)
                    answer = await self.attempts.first_answer(exchange)
                    break
                except GatewayError as failure:
                    failed = failure.again()
                if permit:
                    permit.release()
                if not (target := await self._further(request, dialect, api, caller, record, failed, exchange)):
                    exchange, answer = self.attempts.stays(exchange, failed)
                    break
            exchange.answered(answer)
            try:
                reply = await self.delivery.deliver(exchange, answer)
            finally:
                answer.close()
            self._delivered(exchange, answer, caller, record)
            return reply
        except GatewayError as error:
            return self._refuse(request, dialect, record, error)
        except (asyncio.CancelledError, ConnectionError) as left:
            self._left(request, exchange, record, left)
            if self.running.over:
                return self._refuse(request, dialect, record, shutting_down())
            raise
        except Exception:  # the last border: a bug must not cost more than its own request
            log.exception("unhandled error", extra={"path": request.path, "id": record.id})
            return self._bug(request, dialect, record, exchange)
        finally:
            self._settle(record, api, exchange, permit, task)
            del task  # else a cancelled task, its error and this frame are a cycle, and the request stays in memory with it

    def refuse(self, request: ClientRequest, error: GatewayError, begun: float, lines: bytes = b"") -> ClientReply:
        """Answer, count and log a request that could not be read, as one that could. lines: of the answer's head.

        begun: reading of the clock. Raises ConnectionError if the client has left; what happened is logged all the same.
        """
        record = SettledRequest(request_id(request.headers.get(REQUEST_ID_HEADER)), request.path, begun)
        record.tenant = tenant_label(request.caller().tenant)
        try:
            return self._refuse(request, self.dialects.at(request.path), record, error, lines)
        finally:
            record.ended = self.clock()
            settle(record, self.observers)

    # -- the phases

    def _identify(self, request: ClientRequest, dialect: Dialect, record: SettledRequest) -> Caller:
        """Raises GatewayError 405 or 508."""
        caller = request.caller()
        record.tenant = tenant_label(caller.tenant)
        self.loops.require_no_loop(request.headers.get(VIA_HEADER))
        if record.path == MODELS_PATH:  # the application answers GET and HEAD
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes GET, HEAD.")
        if dialect.strict and request.method != "POST":
            raise GatewayError(405, "method_not_allowed", f"{record.path} takes POST.")
        return caller

    async def _parse(self, request: ClientRequest, dialect: Dialect, caller: Caller, record: SettledRequest) -> ApiRequest:
        """Raises GatewayError 400, 408, 413, 415 or 503."""
        raw = request.take() if request.here else await self._read(request, dialect, record)
        now, aliases = self.parsing.turns.free, self.live.aliases
        api = self.parsing.at_once(dialect, raw, aliases) if now else await self.parsing.in_turn(dialect, raw, aliases)
        if api is None:
            with parsing(request.lease, len(raw)):
                client = request.lease.account.client
                api = await self.parsing.parse(dialect, raw, scope_of(self.live, caller), client, aliases)
        if not dialect.strict:
            if not api.model:
                await find_outside(request, api, self.live.aliases)
            api.refers = dialect.refers(record.path)
            if api.refers and not api.model and (known := self._object(api.refers, caller)):
                api.model = known[1]
        record.stream, record.metered, record.countable = api.stream, api.metered, api.countable
        record.alias = api.alias
        record.generates = api.metered or (request.method == "POST" and generates(record.endpoint, has_prompt=api.has_prompt))
        return api

    def _is_own(self, dialect: Dialect, api: ApiRequest) -> bool:
        """Whether the gateway may have the answer itself."""
        return self.recall.on and (dialect.kept_here or (dialect.in_background and bool(api.stores)))

    async def _own(
        self, request: ClientRequest, dialect: Dialect, api: ApiRequest, caller: Caller, record: SettledRequest
    ) -> ClientReply | None:
        """The answer about something that the gateway keeps itself, or makes in the background. None: it is a replica's.

        Raises GatewayError.
        """
        elsewhere = bool(api.refers and self._object(api.refers, caller))
        if dialect.kept_here:
            answer = await self.recall.answer(request, api, caller, elsewhere=elsewhere)
        else:
            foreseen(self.fleet, self.fleet.target(api.model), self.clock())[1].require()
            record.model, record.generates, record.metered = api.model, False, False  # its run is logged by itself
            answer = await self.recall.start(request, api, caller, self.serve, elsewhere=elsewhere)
        if answer is None:
            record.generates = record.metered = api.metered
            return None
        if isinstance(answer, Following):
            record.status, record.stream = 200, True
            reply = self._reply(request, record, 200, None, _STREAM_LINES)

            def failed(error: GatewayError) -> bytes:
                record.error = error.message
                seen = error if self.audience.is_operator(request) else error.redacted(record.id)
                return dialect.error_event(seen, None) or b""

            await self.recall.followers.send(answer, reply, failed, charge_to(request), self.live.patience_s)
        else:
            record.status, body = answer
            reply = self._reply(request, record, record.status, body, _JSON_LINE)
        record.ok = record.complete = not record.error
        return reply

    async def _recall(
        self, request: ClientRequest, dialect: Dialect, api: ApiRequest, caller: Caller
    ) -> tuple[ApiRequest, Turn | None]:
        """The request with its history. Raises GatewayError 400, 404, 410, 413 or 503."""
        elsewhere = bool(api.refers and self._object(api.refers, caller))
        return await self.recall.begin(request, dialect, api, caller, scope_of(self.live, caller), elsewhere=elsewhere)

    def _object(self, id_: str, caller: Caller) -> tuple[str, str] | None:
        """(replica, model) of an object that a request names."""
        return self.router.objects.find(session_key(id_, OBJECT, *scope_of(self.live, caller)), self.clock())

    async def _read(self, request: ClientRequest, dialect: Dialect, record: SettledRequest) -> bytes:
        limits = self.live.config.limits
        raw = await request.read(max_bytes=self.live.max_body, within_s=limits.body_s, opaque=not dialect.strict)
        record.begun = self.clock()  # an upload takes its time; what counts is ours
        return raw

    async def _admit(
        self, request: ClientRequest, api: ApiRequest, caller: Caller, record: SettledRequest, further: Target | None
    ) -> tuple[Target, Permit]:
        """Where the request may go, and a slot there. further: after a fallback. Raises GatewayError 400, 404, 429 or 503."""
        record.model = api.model
        target = self.fleet.renewed(further) if further else self.fleet.target(api.model)
        record.label = target.label
        target.require()
        if target.fallback is not None and not api.refers:
            self.fallbacks.require_well(target, record)
        permit = target.admission.try_admit()
        if permit is not None:
            return target, permit
        prompt_of(self.live, api, caller, target.label)  # so that only its block keys are in memory while it waits
        permit = await target.wait(record.tenant, request.headers.get(PRIORITY_HEADER))
        try:  # meanwhile replicas may have come and gone, and the model with them
            target = self.fleet.renewed(target) if target.named else self.fleet.target(api.model)
            target.require()
        except GatewayError:
            permit.release()
            raise
        return target, permit

    def _choose(
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
        salt = b""
        if self.live.isolates_tenants:
            if not api.metered:  # else it was parsed as a JSON object
                require_saltable(api.body, request.headers.get("Content-Type") or "")
            salt = tenant_salt(caller.tenant, api.salt)
        booking = self._book(api, target, caller, request.lease.account.client, record)
        exchange = Exchange(request, dialect, api, target, booking, record)
        exchange.salt, exchange.turn = salt, turn
        if api.diagnosis:
            self.diagnoses.begin(exchange, caller, self.clock())
        return exchange

    def _book(self, api: ApiRequest, target: Target, caller: Caller, address: str, record: SettledRequest) -> Booking:
        begun = self.clock()
        prompt = prompt_of(self.live, api, caller, target.label, caller.number(address))
        live = self.fleet.candidates(target, begun)
        if api.refers and (known := self._object(api.refers, caller)) and known[0] in live:
            live = [known[0]]  # no other one has it
        booking = self.router.choose(prompt, live, begun, silent=not (api.metered and api.stream and api.countable))
        decision = booking.decision
        self.metrics.routing_seconds.observe((), self.clock() - begun)
        self.metrics.routing.add((self.router.policy_name, decision.reason))
        record.booking = booking
        record.reason = decision.reason
        record.estimated_prompt_tokens = decision.prompt_tokens
        return booking

    async def _further(
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
        scope = scope_of(self.live, caller)
        return await self.fallbacks.after(failed.code, request, dialect, api, scope, record, exchange)

    def _delivered(self, exchange: Exchange, answer: ReplicaAnswer, caller: Caller, record: SettledRequest) -> None:
        """The answer went out, whole or not."""
        record.status = answer.status
        if answer.status < 400 and not exchange.delivered.error:
            record.ok = record.complete = True
            self.attempts.completed(exchange)
        if exchange.attempts.object:
            self._stored(exchange, caller)
        if exchange.api.diagnosis:
            self.diagnoses.delivered(exchange, caller, self.clock())

    def _stored(self, exchange: Exchange, caller: Caller) -> None:
        """The answer is an object that later requests may name; and the replica knew the one that this request has named."""
        for name in (exchange.attempts.object, exchange.api.refers):
            if name:
                number = session_key(name, OBJECT, *scope_of(self.live, caller))
                self.router.stored(number, exchange.booking.chosen.replica, exchange.api.model, self.clock())

    def _left(self, request: ClientRequest, exchange: Exchange | None, record: SettledRequest, left: BaseException) -> None:
        """The client has left, or has cancelled it, or all requests are to end."""
        record.cancelled = request.cancelled
        record.status, record.error = CLIENT_LEFT, str(left) or "the client left"
        if record.cancelled:
            record.status, record.error = 200, ""
            if exchange is not None:
                record.ok = exchange.booking.lease.decoding
            return
        if exchange is None:
            return
        record.ok = exchange.booking.lease.decoding  # what the replica has prefilled by now it does hold
        record.error = exchange.attempts.error or record.error
        delivered = exchange.delivered
        if delivered.done_sent or (delivered.reply and delivered.reply.satisfied):  # it had everything
            record.status, record.error = delivered.status, exchange.attempts.error
            record.complete = record.ok and delivered.status < 400
        elif delivered.reader and (reported := delivered.reader.reported):  # it left when it had read that the engine failed
            record.status, record.error = delivered.status, reported.message

    def _settle(
        self,
        record: SettledRequest,
        api: ApiRequest | None,
        exchange: Exchange | None,
        permit: Permit | None,
        task: asyncio.Task[object],
    ) -> None:
        """Release what the request has held, complete the record, and give it to the observers."""
        if permit:
            permit.release()
        self.running.leave(task)
        if api is not None:
            api.drop()
        if exchange is not None:
            chosen, attempts, delivered = exchange.booking.chosen, exchange.attempts, exchange.delivered
            attempts.drop_refusal()
            record.replica = chosen.replica
            record.predicted_cached_tokens = chosen.matched_tokens
            record.failed_attempts = attempts.failed
            record.answered = delivered.status
            record.first_byte, record.last_byte = delivered.first_byte, delivered.last_byte
            record.usage, record.resumed = delivered.usage, delivered.resumed
            if record.answered == SWITCHING and delivered.reply:
                record.usage, record.unread = delivered.reply.usage, delivered.reply.unread
                record.countable = False  # the sum of several prompts
            record.translated = exchange.answers is not exchange.dialect
            if not record.cancelled:
                record.error = record.error or delivered.error or attempts.error
        record.ended = self.clock()
        settle(record, self.observers)

    # -- what several phases need

    def _bug(self, request: ClientRequest, dialect: Dialect, record: SettledRequest, exchange: Exchange | None) -> ClientReply:
        """A bug has ended the request."""
        if exchange is not None and (sent := exchange.delivered.reply) and sent.begun:
            sent.cut()  # nothing sane can follow what went out
        return self._refuse(request, dialect, record, internal_error())

    def _refuse(
        self, request: ClientRequest, dialect: Dialect, record: SettledRequest, error: GatewayError, lines: bytes = b""
    ) -> ClientReply:
        """The answer to a request that cannot be served: the only place where a request's error becomes one."""
        record.status, record.error = error.status, error.message
        body = dialect.error_body(error if self.audience.is_operator(request) else error.redacted(record.id), record.id)
        lines = _JSON_LINE + lines
        if dialect.id_header:
            lines += b"%b: %b\r\n" % (dialect.id_header, record.id.encode("ascii"))
        if error.retry_after_s is not None:
            lines += b"Retry-After: %d\r\n" % error.retry_after_s
        return self._reply(request, record, error.status, body, lines)

    def _reply(
        self, request: ClientRequest, record: SettledRequest, status: int, body: bytes | None, lines: bytes
    ) -> ClientReply:
        """An answer of the gateway's own. body: None: it comes later. lines: of its head, beside those of all such answers."""
        # While this gateway goes down, the client's next request should reach another one; and no request follows half of one.
        keep_alive = request.complete and not self.running.draining
        reply = request.reply(keep_alive=keep_alive, patience_s=self.live.patience_s)
        headers = b"X-Request-Id: %b\r\n%b" % (record.id.encode("ascii"), lines)
        if self.live.cors_origins:
            headers += answer_lines(self.live.cors_origins, request.headers.get("Origin"))
        reply.begin(status, headers, length=None if body is None else len(body), first=body or b"")
        return reply


def prompt_of(live: Live, api: ApiRequest, caller: Caller, label: str, client: int = 0) -> Prompt:
    """A request's prompt for the router, seeded so that models and cache salts never match each other, nor, with
    `routing.isolation: tenant`, tenants.

    label: the model's bounded name. client: a number for the client.
    """
    return router_prompt(api, live.blocks, label, session_of(api, caller, label), client, scope_of(live, caller))


def session_of(api: ApiRequest, caller: Caller, label: str) -> tuple[str, int]:
    """The session that a request belongs to: its name, "" without one, and its number for the router's memory, which takes less
    reliable names as well: one that never comes again costs nothing there.
    """
    name = caller.session or api.session
    known = name or caller.weak_session
    return name, session_key(known, label, caller.tenant) if known else 0


def scope_of(live: Live, caller: Caller) -> tuple[str, ...]:
    """Names that keep the prompts of this caller apart from those of others, beside the model and the cache salt."""
    return (caller.tenant,) if live.isolates_tenants else ()
