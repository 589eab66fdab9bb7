"""The life of one request, in phases.

    identify ─► parse ─► admit ─► choose ─► attempt ─► deliver ─► settle
       │401 405   │400      │400 403 │400       │502       │ event     always, once: the observers of settle.py
       │508       │408 413  │404     │429       │503       │ or cut
       │          │415 503  │429 503 │          │          │
       └──────────┴─────────┴────────┴──────────┴──► the error's answer, in the dialect's shape
                            ▲        ▲          │ fails before its first byte: another replica (attempts.py)
                            │        └── move ──┤
                            └─── another pool ──┘ for a failure of the pool, where it has a fallback (features);
                                                  of a stream up to its first token

- identify: its sender (by its key, if there are keys), its id, its dialect; loops are refused.
- parse: its body is read and parsed.
- answerers, preparers: features that answer a request themselves, or change it (`extensions.py`).
- admit: the replicas that serve its model, and a slot there, at once or after a wait in the pool's queue.
- choose: one synchronous decision of the router, with its booking. A request whose prefix another one is computing may wait for
  that (`phases/holding.py`).
- attempt: up to the first byte of an answer. The client has got nothing yet but pulses (`pulses.py`), so it does not notice
  failures.
- deliver: the answer to the client. From now on an error can only be an event of the stream.
- settle: the record is completed, and the observers get it. The booking is closed in any case, also if the client disconnects
  (its
  handler is cancelled).

This file has the order of the phases, and the handling of each error; the phases themselves are in `phases/`, `attempts.py` and
`delivery.py`, over one `Exchange`. A request and its reply are implementations of `request/client.py`: there is no socket.
`run` is for requests of the gateway itself, which begin after parse: a background run, a step of a workflow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.config.live import Live
from gateway.dialects.api_request import ApiRequest
from gateway.dialects.table import Dialects
from gateway.errors import GatewayError, shutting_down
from gateway.fleet.directory import Target
from gateway.request.attempts import Attempts
from gateway.request.callers import Callers
from gateway.request.client import REQUEST_ID_HEADER, Caller, ClientReply, ClientRequest, InternalRequest
from gateway.request.delivery import Delivery
from gateway.request.exchange import Exchange
from gateway.request.extensions import Extensions
from gateway.request.phases.admitting import AdmitPhase
from gateway.request.phases.choosing import ChoosePhase
from gateway.request.phases.ending import EndPhase
from gateway.request.phases.holding import HoldPhase
from gateway.request.phases.reading import ReadPhases
from gateway.request.phases.replies import Replies
from gateway.request.pulses import Pulses
from gateway.request.record import new_record, tenant_label, user_agent_of
from gateway.request.running import RunningRequests
from gateway.upstream.client import ReplicaAnswer

log = logging.getLogger("warmroute.gateway")


@dataclass(slots=True, eq=False, kw_only=True)
class Lifecycle:
    """Serves requests (see the module). clock: monotonic seconds, the same for the router and for all durations."""

    dialects: Dialects
    extensions: Extensions
    callers: Callers
    running: RunningRequests
    reading: ReadPhases
    admitting: AdmitPhase
    choosing: ChoosePhase
    holding: HoldPhase
    attempts: Attempts
    delivery: Delivery
    ending: EndPhase
    replies: Replies
    pulses: Pulses
    live: Live
    clock: Callable[[], float]

    def serve(self, request: ClientRequest) -> Coroutine[Any, Any, ClientReply]:
        """Answer a request. Raises ConnectionError or CancelledError if the client has disconnected; any other error becomes an
        answer.
        """
        return self._serve(self._begin(request, self.clock()))

    def run(self, request: InternalRequest, api: ApiRequest, caller: Caller) -> Coroutine[Any, Any, ClientReply]:
        """`serve`, from the phase after parse on, for a request without bytes."""
        exchange = self._begin(request, self.clock())
        if request.fields is not None:
            exchange.record.fields = {**(exchange.record.fields or {}), **request.fields}
        self.reading.known(exchange, caller, api)
        return self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> ClientReply:
        task = self.running.enter(exchange)
        try:
            try:
                return await self._answer(exchange)
            except asyncio.CancelledError:
                if exchange.instead is None:
                    raise
            task.uncancel()
            self.ending.withdraw(exchange)
            return await exchange.instead(exchange)
        except GatewayError as error:
            return self.replies.refuse(exchange, error)
        except (asyncio.CancelledError, ConnectionError) as left:
            self.ending.left(exchange, left)
            if exchange.ended_by is not None:
                return self.replies.refuse(exchange, exchange.ended_by.again())
            if self.running.over:
                return self.replies.refuse(exchange, shutting_down())
            raise
        except Exception:  # the outermost handler: a bug must cost only its own request
            log.exception("unhandled error", extra={"path": exchange.request.path, "id": exchange.record.id})
            return self.replies.bug(exchange)
        finally:
            self.pulses.forget(exchange)
            if exchange.ended_by is not None:
                task.uncancel()  # it was cancelled for this request; the next one of its connection may go on
            self.ending.settle(exchange, task)
            del task  # else a cancelled task, its error and this frame are a cycle, and the request stays in memory with it

    async def _answer(self, exchange: Exchange) -> ClientReply:
        """Run the phases in order. Raises GatewayError."""
        if not exchange.parsed:
            if self.callers.looks_up:
                await self.reading.look_up(exchange)
            else:
                self.reading.identify(exchange)
            await self.reading.parse(exchange)
        for answerer in self.extensions.answerers:
            if answerer.claims(exchange) and (own := await answerer.answer(exchange)):
                return own
        for preparer in self.extensions.preparers:
            if preparer.concerns(exchange):
                await preparer.prepare(exchange)
        self.pulses.watch(exchange)
        fallback = self.extensions.fallback
        target: Target | None = None
        while True:
            try:
                await self.admitting.admit(exchange, target)
                self.choosing.choose(exchange)
                if exchange.booking.lead is not None:
                    await self.holding.wait(exchange)
                return await self._deliver(exchange, await self.attempts.first_answer(exchange))
            except GatewayError as failure:
                failed = failure.again()
            exchange.leave_queue()
            if fallback is None or not (target := await fallback.after(exchange, failed)):
                break
        if not exchange.delivered.early and (own := self._substitute(exchange, failed)):
            return own
        return await self._deliver(exchange, self.attempts.final_refusal(exchange, failed))

    async def _deliver(self, exchange: Exchange, answer: ReplicaAnswer) -> ClientReply:
        try:
            reply = await self.delivery.deliver(exchange, answer)
        finally:
            answer.close()
        self.ending.delivered(exchange, answer)
        return reply

    def _substitute(self, exchange: Exchange, failed: GatewayError) -> ClientReply | None:
        """The first answer of a feature in place of the error."""
        return next((own for substitute in self.extensions.substitutes if (own := substitute(exchange, failed))), None)

    async def require_welcome(self, request: ClientRequest) -> None:
        """Check that the sender may open a connection for later requests. Raises GatewayError 400, 401, 429 or 503."""
        await self.callers.look_up(request.headers)
        self.callers.require_welcome(self.callers.of(request))

    def refuse(self, request: ClientRequest, error: GatewayError, begun: float, lines: bytes = b"") -> ClientReply:
        """Answer, count and log a request that could not be read. lines: of the answer's head.

        begun: reading of the clock. Raises ConnectionError if the client has disconnected, after logging.
        """
        exchange = self._begin(request, begun)
        exchange.record.sender.tenant = tenant_label(self.callers.known(request).tenant)
        try:
            return self.replies.refuse(exchange, error, lines)
        finally:
            self.ending.unread(exchange.record)

    def _begin(self, request: ClientRequest, begun: float) -> Exchange:
        record = new_record(request.headers.get(REQUEST_ID_HEADER), request.path, begun)
        exchange = Exchange(request, self.dialects.at(request.path), record)
        if self.live.logs_clients:
            record.sender.client = request.lease.account.client
            record.sender.user_agent = request.derived(user_agent_of)
        for begin in self.extensions.begun:
            begin(exchange)
        return exchange
