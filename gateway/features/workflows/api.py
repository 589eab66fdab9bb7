"""The endpoints below /v1/workflows.

POST /v1/workflows/runs     a run: its events as they happen (stream), or the run when it has ended
POST /v1/workflows/plan     bounds, shared prefixes, warnings; nothing is run
GET  /v1/workflows          the workflows that the key may use
GET  /v1/workflows/schema   JSON Schema of documents
     /v1/workflows/NAME     GET: one of them; PUT, DELETE: one of the sender's stored ones
     /v1/workflows/runs/ID  runs in the background (`background/answers.py`)
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

import orjson

from gateway.core import Core
from gateway.errors import GatewayError, shutting_down
from gateway.features.runs.event_log import EventLog
from gateway.features.workflows.background.answers import BackgroundAnswers
from gateway.features.workflows.background.runs import BackgroundRuns
from gateway.features.workflows.connectors import Connectors
from gateway.features.workflows.directory import PREFIX, WorkflowLibrary
from gateway.features.workflows.door import WorkflowDoor
from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.language.json_schema import document_schema
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.features.workflows.plan_answers import PlanAnswers
from gateway.features.workflows.recent_runs import RecentRuns
from gateway.features.workflows.run_request import RunRequests, read_body
from gateway.features.workflows.running.calls import ModelCalls
from gateway.features.workflows.running.event_stream import EventSender, error_event, event_bytes, unread_logs
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.run import WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.features.workflows.running.step_request import StepRequest
from gateway.features.workflows.section import WORKFLOWS
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.notes import RUN
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES
from gateway.telemetry.notices import Notices

log = logging.getLogger("warmroute.workflows")

_BACKGROUND_RUNS: Final = "/v1/workflows/runs/"
_PATH: Final = re.compile(r"/v1/workflows(?:/([^/]{1,100})(?:/([^/]{1,100}))?)?/?")


class WorkflowApi:
    """Answers requests below /v1/workflows, and runs workflows."""

    def __init__(self, core: Core, recent: RecentRuns) -> None:
        self._core = core
        self.operators = library = WorkflowLibrary()
        self._notices = Notices(core.clock)
        self._metrics = core.metrics.of(WorkflowsMetrics)
        connectors = Connectors(lambda: WORKFLOWS.of(core.config).connectors, core.live, core.around.resolver)
        core.work.closes.append(self._close)
        self._connectors = connectors
        self.requests = RunRequests(core, library, connectors)
        self._plans = PlanAnswers(core)
        self._services = RunServices(ModelCalls(core), connectors, core.clock, core.wall_clock)
        self._logs = unread_logs()
        self._door = WorkflowDoor(core, self.requests, self._services, self._logs, self._perform)
        self._recent = recent
        self.background = BackgroundRuns(core, self._services, recent)
        self._background = BackgroundAnswers(core, self.background)
        core.gauges.append(lambda: self._metrics.running.set((), len(recent)))

    def read_directory(self, directory: Path) -> None:
        """Read the operator's workflows. Blocks."""
        try:
            problems = self.operators.read(directory)
        except OSError as error:
            problems = [f"it cannot be read: {error.strerror}"]
        text = "workflow not read from the directory: its former document stays, if there is one"
        for problem in problems:
            self._notices.say("file", log.error, text, {"directory": str(directory), "problem": problem})

    async def _close(self) -> None:
        self._connectors.close()

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError."""
        found = _PATH.fullmatch(exchange.record.path)
        name, rest = found.groups() if found else ("", "")
        if exchange.api.model.startswith(PREFIX) and not found:
            return await self._by_model(exchange)
        if name != "runs" or rest is not None:  # limits of its key; the steps of a run enter by themselves
            for enter in self._core.extensions.entering:
                enter(exchange)
        try:
            if found and rest is None and name == "runs":
                _require(exchange, "POST")
                return await self._run(exchange)
            if found and rest is None and name == "plan":
                _require(exchange, "POST")
                return await self._plan(exchange)
            if found and name is None:
                _require(exchange, "GET")
                return self._json(exchange, {"object": "list", "data": await self.requests.names.listed(exchange)})
            if found and rest is None and name == "schema":
                _require(exchange, "GET")
                return self._json(exchange, document_schema())
            if found and rest is None:
                return await self._named(exchange, unquote(name))
            if exchange.record.path.startswith(_BACKGROUND_RUNS):
                return await self._background.answer(exchange)
        except DocumentError as error:
            raise error.answer() from None
        raise GatewayError(404, "not_found", f"There is nothing at {exchange.record.path[:100]}.")

    async def _by_model(self, exchange: Exchange) -> ClientReply:
        if isinstance(exchange.request, StepRequest):  # its calls would be beyond the plan of its run, and it may call itself
            text = f"A step calls a model; {exchange.api.model[:80]!r} is a workflow."
            raise GatewayError(400, "workflow_invalid", text, param="model")
        try:
            return await self._door.answer(exchange)
        except DocumentError as error:
            raise error.answer() from None

    async def _named(self, exchange: Exchange, name: str) -> ClientReply:
        """The endpoints of one named workflow."""
        _require(exchange, "GET", "PUT", "DELETE")
        names = self.requests.names
        answer = {"GET": names.shown, "PUT": names.put, "DELETE": names.delete}[exchange.request.method]
        return self._json(exchange, await answer(name, exchange))

    async def _plan(self, exchange: Exchange) -> ClientReply:
        body = read_body(exchange.api.body)
        planned = await self.requests.planned(body, exchange)
        return self._json(exchange, await self._plans.answer(planned, body, exchange))

    async def _run(self, exchange: Exchange) -> ClientReply:
        raw = exchange.api.body
        body = read_body(raw)
        exchange.api.body = b""
        planned = await self.requests.planned(body, exchange)
        order = self.requests.order(planned, body, exchange)
        if exchange.notes is not None:
            exchange.notes.enter(RUN, self._core.clock())
        if body.background:
            return await self._background.begin(exchange, order, raw, stream=body.stream)
        if body.stream:
            return await self._streamed(exchange, order)
        run = WorkflowRun(f"run_{uuid4().hex}", order, exchange.request, self._services, _ignored)
        await self._perform(run)
        return self._json(exchange, run.as_json())

    async def _streamed(self, exchange: Exchange, order: RunOrder) -> ClientReply:
        core, record = self._core, exchange.record
        id_ = f"run_{uuid4().hex}"
        lease = exchange.request.lease.account.lease()
        key = ("", id_)
        events = self._logs.open(key, lease)

        def emit(number: int, event: RunEvent) -> None:
            self._logs.add(events, event_bytes(id_, number, event))

        run = WorkflowRun(id_, order, exchange.request, self._services, emit)
        record.status, record.subject.stream = 200, True
        try:
            reply = core.replies.begin(exchange, 200, None, STREAM_LINES)
            record.error = await self._with_client(run, events, reply)
        finally:
            self._logs.forget(key)
        record.answer.ok = record.answer.complete = not record.error
        return reply

    async def _with_client(self, run: WorkflowRun, events: EventLog, reply: ClientReply) -> str:
        """Run it beside the client that reads its events; when one of them ends early, so does the other. Returns the error of
        its stream, or "".
        """

        async def perform() -> None:
            try:
                await self._perform(run)
            finally:
                events.end()

        running = asyncio.get_running_loop().create_task(perform(), name=run.id)
        sender = EventSender(events, reply, logs=self._logs)
        try:
            await sender.run(self._core.live.patience_s)
            await running
            reply.end()
        except GatewayError as error:
            return _end_with(error, run, sender.sent + 1, reply)
        except asyncio.CancelledError:
            if not self._core.running.over:
                raise  # the client left
            return _end_with(shutting_down(), run, sender.sent + 1, reply)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return ""

    async def _perform(self, run: WorkflowRun) -> None:
        metrics, begun = self._metrics, self._core.clock()
        self._recent.begin(run)
        try:
            await run.run()
        finally:
            self._recent.end(run)
            metrics.count_run(run, self._core.clock() - begun)

    def _json(self, exchange: Exchange, value: object) -> ClientReply:
        record = exchange.record
        record.status = 200
        reply = self._core.replies.begin(exchange, 200, orjson.dumps(value), JSON_LINE)
        record.answer.ok = record.answer.complete = True
        return reply


def _end_with(error: GatewayError, run: WorkflowRun, number: int, reply: ClientReply) -> str:
    reply.end(error_event(run.id, number, error))
    return error.message


def _ignored(number: int, event: RunEvent) -> None:
    """A client without a stream gets the run when it has ended."""


def _require(exchange: Exchange, *allowed: str) -> None:
    if exchange.request.method not in allowed:
        raise GatewayError(405, "method_not_allowed", f"{exchange.record.path[:100]} takes {', '.join(allowed)}.")
