"""One request's life, in phases.

    identify ─► parse ─► admit ─► choose ─► attempt ─► deliver ─► settle
       │401 405   │400      │400 403 │400       │502       │ event     always, once: the observers of settle.py
       │508       │408 413  │404     │429       │503       │ or cut
       │          │415 503  │429 503 │          │          │
       └──────────┴─────────┴────────┴──────────┴──► the error's answer, in the dialect's shape
                            ▲        ▲          │ fails before its first byte: another replica (attempts.py)
                            │        └── move ──┤
                            └─── another pool ──┘ for a failure of the pool, where it has a fallback (fallback/)

- identify: who sends it (by its key, where there are keys), under which id, in which dialect; whether it has been here before.
- parse: its body, read and understood.
- admit: the replicas that serve its model, and a slot there, at once or after a wait in the pool's queue.
- choose: one synchronous decision of the router, with its booking.
- attempt: until the first byte of an answer. Nothing has gone to the client yet, so what fails is invisible to it.
- deliver: the answer to the client. From here on an error can only be an event of the stream.
- settle: the record is complete, and the observers get it. The booking is closed whatever has happened, the client's leaving
  included (its handler is cancelled).

This file has the order of the phases, and what follows from each error; what a phase does is in `phases/`, `attempts.py` and
`delivery.py`. A request and its reply are whatever implements `request/client.py`; there is no socket here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.admission.pool_queue import Permit
from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import Dialects
from gateway.errors import GatewayError, shutting_down
from gateway.features.diagnostics.diagnoses import Diagnoses
from gateway.features.fallback_pools.fallbacks import Fallbacks
from gateway.features.histories.histories import Turn
from gateway.features.keys.callers import Callers
from gateway.features.keys.limiting import Limiting
from gateway.features.live_page.requests import LiveRequests
from gateway.features.responses.keeping import Keeping
from gateway.features.responses.recall import Recall
from gateway.features.savings.counterfactual import Counterfactual
from gateway.features.tracing.sampling import Tracer
from gateway.fleet.directory import Fleet, Target
from gateway.parser.parsing import Parsing
from gateway.request.attempts import Attempts
from gateway.request.client import REQUEST_ID_HEADER, Audience, ClientReply, ClientRequest
from gateway.request.delivery import Delivery
from gateway.request.exchange import Exchange
from gateway.request.phases.admitting import Admitting
from gateway.request.phases.choosing import Choosing
from gateway.request.phases.ending import Ending
from gateway.request.phases.objects import ReplicaObjects
from gateway.request.phases.reading import Reading
from gateway.request.phases.replies import Replies
from gateway.request.record import SettledRequest, request_id, tenant_label
from gateway.request.running import Running
from gateway.request.settle import Observer
from gateway.telemetry.metrics import Metrics
from gateway.upstream.client import ReplicaAnswer
from gateway.upstream.loop_guard import LoopGuard
from router import Router

log = logging.getLogger("warmroute.gateway")


@dataclass(slots=True, eq=False, kw_only=True)
class Lifecycle:
    """See the top of this file. clock: monotonic seconds, the same for the router and for all durations. tracer: chooses the
    requests that are traced; None: none are. watch: shows requests to whoever watches.
    """

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
    callers: Callers
    limiting: Limiting
    loops: LoopGuard
    metrics: Metrics
    clock: Callable[[], float]
    counterfactual: Counterfactual | None = None
    tracer: Tracer | None = None
    watch: LiveRequests | None = None
    # The phases, made of the parts above.
    reading: Reading = field(init=False)
    kept: Keeping = field(init=False)
    admitting: Admitting = field(init=False)
    choosing: Choosing = field(init=False)
    ending: Ending = field(init=False)
    replies: Replies = field(init=False)

    def __post_init__(self) -> None:
        live, clock = self.live, self.clock
        objects = ReplicaObjects(live, self.router, clock)
        self.replies = Replies(live, self.running, self.audience)
        self.reading = Reading(live, self.parsing, objects, self.callers, self.loops, clock)
        self.kept = Keeping(live, self.fleet, self.recall, objects, self.replies, self.limiting, clock)
        self.admitting = Admitting(live, self.fleet, self.fallbacks, self.limiting, self.metrics, clock)
        self.choosing = Choosing(live, self.fleet, self.router, objects, self.diagnoses, self.metrics, clock)
        self.choosing.counterfactual, self.choosing.watch = self.counterfactual, self.watch
        self.ending = Ending(self.attempts, objects, self.diagnoses, self.running, self.observers, clock)

    async def serve(self, request: ClientRequest) -> ClientReply:
        """Answer a request. Raises ConnectionError or CancelledError if the client has left; any other error is an answer."""
        record = self._record(request, self.clock())
        task = self.running.enter()
        dialect = self.dialects.at(request.path)
        api: ApiRequest | None = None
        turn: Turn | None = None
        exchange: Exchange | None = None
        permit: Permit | None = None
        target: Target | None = None
        try:
            caller = self.reading.identify(request, dialect, record) or await self.reading.looked_up(request, dialect, record)
            api = await self.reading.parse(request, dialect, caller, record)
            if self.kept.owns(dialect, api) and (own := await self.kept.own(request, dialect, api, caller, record, self.serve)):
                return own
            if self.kept.concerns(request, dialect, api):
                api, turn = await self.kept.begin(request, dialect, api, caller, record)
            while True:
                try:
                    target, permit = await self.admitting.admit(request, api, caller, record, target)
                    exchange = self.choosing.choose(request, dialect, api, target, caller, record, turn)
                    answer = await self._first_answer(exchange, record)
                    break
                except GatewayError as failure:
                    failed = failure.again()
                if permit:
                    permit.release()
                if not (target := await self.admitting.further(request, dialect, api, caller, record, failed, exchange)):
                    exchange, answer = self.attempts.stays(exchange, failed)
                    break
            exchange.answered(answer)
            try:
                reply = await self.delivery.deliver(exchange, answer)
            finally:
                answer.close()
            self.ending.delivered(exchange, answer, caller, record)
            return reply
        except GatewayError as error:
            return self.replies.refuse(request, dialect, record, error)
        except (asyncio.CancelledError, ConnectionError) as left:
            self.ending.left(request, exchange, record, left)
            if self.running.over:
                return self.replies.refuse(request, dialect, record, shutting_down())
            raise
        except Exception:  # the last border: a bug must not cost more than its own request
            log.exception("unhandled error", extra={"path": request.path, "id": record.id})
            return self.replies.bug(request, dialect, record, exchange)
        finally:
            self.ending.settle(record, api, exchange, permit, task)
            del task  # else a cancelled task, its error and this frame are a cycle, and the request stays in memory with it

    async def _first_answer(self, exchange: Exchange, record: SettledRequest) -> ReplicaAnswer:
        """Unless a limit of its key forbids it. Raises GatewayError."""
        self.limiting.expect(exchange, record)
        return await self.attempts.first_answer(exchange)

    async def require_welcome(self, request: ClientRequest) -> None:
        """Whether its sender may open a connection for requests to come. Raises GatewayError 400, 401, 429 or 503."""
        await self.callers.look_up(request.headers)
        grant = self.callers.of(request).grant
        if grant is not None:
            self.limiting.require(grant)

    def refuse(self, request: ClientRequest, error: GatewayError, begun: float, lines: bytes = b"") -> ClientReply:
        """Answer, count and log a request that could not be read, as one that could. lines: of the answer's head.

        begun: reading of the clock. Raises ConnectionError if the client has left; what happened is logged all the same.
        """
        record = self._record(request, begun)
        record.tenant = tenant_label(self.callers.known(request).tenant)
        try:
            return self.replies.refuse(request, self.dialects.at(request.path), record, error, lines)
        finally:
            self.ending.unread(record)

    def _record(self, request: ClientRequest, begun: float) -> SettledRequest:
        record = SettledRequest(request_id(request.headers.get(REQUEST_ID_HEADER)), request.path, begun)
        if self.tracer is not None:
            record.trace = self.tracer.begin(request, begun)
        return record
