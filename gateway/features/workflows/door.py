"""A workflow as a model: `model: "workflow:NAME"` in OpenAI's chat, and by translation in Messages and Responses.

    body (chat, or translated to chat) ──► inputs ──► run ──► its primary output: the assistant's text, streamed or whole
                                                          └──► other outputs: member `workflow` of the answer or its last chunk

The text of the step that is the primary output (`running/passing.py`) passes as it comes, once no step can kill it any more.
Any other primary output comes in one piece. Until the first byte of text only signs of life are sent (`request/pulses.py`): a
failure has the status of its step, or is an event with its code after these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import orjson

from gateway.core import Core
from gateway.errors import GatewayError, bad_request, shutting_down
from gateway.features.runs.event_log import EventLog, Logs
from gateway.features.workflows.directory import PREFIX
from gateway.features.workflows.door_form import DoorForm, form_of, unfit
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.inputs import MESSAGES
from gateway.features.workflows.language.values import text_of
from gateway.features.workflows.language.workflow import RunLimits, Workflow
from gateway.features.workflows.run_request import RunRequestBody, RunRequests
from gateway.features.workflows.running.event_stream import EventSender
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.outputs import PASSING, PASSING_RESET, RETRACTED
from gateway.features.workflows.running.passing import PassingText
from gateway.features.workflows.running.run import EVENTS, WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.features.workflows.running.scheduler import COMPLETED
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.notes import RUN
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES
from gateway.request.pulses import counts_events

Perform = Callable[[WorkflowRun], Awaitable[None]]


class WorkflowDoor:
    """Answers chat requests whose model is a workflow. perform: runs and counts a run."""

    def __init__(self, core: Core, requests: RunRequests, services: RunServices, logs: Logs, perform: Perform) -> None:
        self._core, self._requests, self._services, self._logs, self._perform = core, requests, services, logs, perform

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError or DocumentError."""
        form = await form_of(exchange)
        name = exchange.api.model.removeprefix(PREFIX)
        exchange.record.subject.model = exchange.api.model
        body = RunRequestBody(name, "", None, exchange.api.stream, RunLimits(), {})
        try:
            planned = await self._requests.planned(body, exchange)
        except GatewayError as error:
            if error.param == "workflow":  # a member of another endpoint
                error.param = "model"
            raise
        primary = planned.workflow.primary
        if primary is None:
            raise unfit("model", f"The workflow {name!r} names no primary output, which would be the answer's text.")
        body = body._replace(inputs=_inputs(planned.workflow, form.body))
        order = self._requests.order(planned, body, exchange, primary if exchange.api.stream else "")
        if exchange.notes is not None:
            exchange.notes.enter(RUN, self._core.clock())
        answer = DoorAnswer(exchange, form, planned.workflow, primary)
        if exchange.api.stream:
            return await self._streamed(exchange, order, answer)
        run = answer.run = self._run(exchange, order, answer.take)
        await self._perform(run)
        answer.require_complete()
        body_bytes = form.whole(answer.completion())
        return self._begun(exchange, body_bytes, JSON_LINE, answer)

    def _run(self, exchange: Exchange, order: RunOrder, emit: Callable[[int, RunEvent], None]) -> WorkflowRun:
        return WorkflowRun(f"run_{uuid4().hex}", order, exchange.request, self._services, emit)

    def _begun(self, exchange: Exchange, body: bytes | None, lines: bytes, answer: DoorAnswer) -> ClientReply:
        record = exchange.record
        record.status = 200
        self._core.pulses.forget(exchange)
        if exchange.delivered.early and (begun := exchange.delivered.reply) is not None:
            record.answer.ok = record.answer.complete = True
            return begun
        if answer.form.ignored:
            lines += f"X-Warmroute-Ignored: {', '.join(answer.form.ignored)}\r\n".encode("ascii", "replace")
        reply = self._core.replies.begin(exchange, 200, body, lines)
        record.answer.ok = record.answer.complete = True
        return reply

    async def _streamed(self, exchange: Exchange, order: RunOrder, answer: DoorAnswer) -> ClientReply:
        lease = exchange.request.lease.account.lease()
        run = answer.run = self._run(exchange, order, answer.take)
        key = ("", run.id)
        log = self._logs.open(key, lease)
        answer.send = lambda data: self._logs.add(log, data)

        async def perform() -> None:
            try:
                await self._perform(run)
                answer.finish()
            finally:
                log.end()

        running = asyncio.get_running_loop().create_task(perform(), name=run.id)
        exchange.record.subject.stream = True
        self._core.pulses.watch(exchange)
        try:
            while not (log.next or log.ended):
                await log.changed()
            if not log.next:
                await running
                answer.require_complete()
            reply = self._begun(exchange, None, STREAM_LINES, answer)
            await self._sent(exchange, log, reply, answer)
            if not self._core.running.over:
                await running
                reply.end()
        finally:
            running.cancel()
            try:
                await asyncio.gather(running, return_exceptions=True)
            finally:  # the wait may be cancelled, too
                self._logs.forget(key)
        if error := answer.error():
            exchange.record.error, exchange.record.code = error.message, error.code
            exchange.record.answer.ok = exchange.record.answer.complete = False
        return reply

    async def _sent(self, exchange: Exchange, log: EventLog, reply: ClientReply, answer: DoorAnswer) -> None:
        request, live = exchange.request, self._core.live

        def pulse() -> bytes:
            exchange.record.answer.pulses += 1
            return exchange.dialect.pulse("generating", event=counts_events(request))

        every_s = live.keepalive_s if request.pulses else 0.0
        try:
            await EventSender(log, reply, logs=self._logs, every_s=every_s, pulse=pulse).run(live.patience_s)
        except GatewayError as error:  # the client was too slow
            reply.write(answer.form.error(error))
        except asyncio.CancelledError:
            if not self._core.running.over:
                raise  # the client left
            reply.end(answer.form.error(shutting_down()))


class DoorAnswer:
    """The answer of one run: takes its events. run, send: set before it begins; send: None: the answer comes as a whole."""

    run: WorkflowRun

    def __init__(self, exchange: Exchange, form: DoorForm, workflow: Workflow, primary: str) -> None:
        self.form = form
        self.send: Callable[[bytes], None] | None = None
        self._model = exchange.api.alias or exchange.api.model
        self._asked, self._primary = workflow, primary
        self._yielded = workflow.outputs is None  # else the document computes it at the end of the run
        self._value: Any = None
        self._texts: dict[str, list[str]] = {}  # by step: not sent yet
        self._skipped: dict[str, str] = {}  # by step that failed: why
        self._done = self._certain = self._begun = False

    def take(self, _number: int, event: RunEvent) -> None:
        """An event of the run."""
        if event.kind == PASSING:
            self._texts.setdefault(event.data["step"], []).append(event.data["text"])
        elif event.kind == PASSING_RESET:
            self._texts.pop(event.data["step"], None)
        elif event.kind == "step.skipped" and "error" in event.data:
            self._skipped[event.data["step"].partition("[")[0]] = event.data["error"]["message"]
        elif event.kind == EVENTS[COMPLETED] and not self._yielded:
            self._take_value(event.data["outputs"][self._primary], is_certain=True)
        elif self._yielded and event.data.get("name") == self._primary:
            self._of_output(event)
        if self.send is not None:
            self._send_fresh()

    def _take_value(self, value: Any, *, is_certain: bool) -> None:
        """null is no answer: its steps were skipped."""
        self._value, self._done, self._certain = value, value is not None, is_certain

    def _of_output(self, event: RunEvent) -> None:
        """An event of the primary output."""
        if event.kind == "output.done":
            self._take_value(event.data["value"], is_certain=not event.data["provisional"])
        elif event.kind == "output.confirmed":
            self._certain = True
        elif event.kind == "output.retracted":
            self._done = False

    def _send_fresh(self) -> None:
        """Sends the text that has come since the last call, or the value in one piece; none if it is retracted."""
        board = self.run.scheduler.board
        output = board.outputs.get(self._primary) if self._yielded else None
        if output is not None and output.state == RETRACTED:
            return
        source = board.passing.source()
        if source is not None:
            text = "".join(self._texts.pop(source.name, ()))
        elif self._done and self._certain:
            text, self._certain = text_of(self._value), False  # once
        else:
            return
        if text:
            self._write({"content": text} if self._begun else {"role": "assistant", "content": text})

    def error(self) -> GatewayError | None:
        """The reason why there is no complete answer; None: there is."""
        scheduler = self.run.scheduler
        if scheduler.status == COMPLETED:
            if self._done:
                return None
            text = f"The workflow has ended without its primary output {self._primary!r}.{self._skipped_for()}"
            return GatewayError(502, "workflow_door", text)
        failure = scheduler.error
        if failure is not None:
            status = failure.status if failure.status >= 400 else 502
            retry = round(failure.retry_after_s) if failure.retry_after_s else None
            where = f"step {scheduler.failed_step}: " if scheduler.failed_step else ""
            return GatewayError(status, failure.cause or failure.code, f"{where}{failure.message}", retry_after_s=retry)
        return GatewayError(504, scheduler.reason or scheduler.status, f"A limit has ended the run ({scheduler.reason}).")

    def _skipped_for(self) -> str:
        """The latest skipped step with an error that the primary output needs."""
        graph, outputs = self._asked.graph, self._asked.outputs
        if outputs is not None:
            needed = graph.needed_for(graph.steps_in(outputs[self._primary]))
        else:
            needed = graph.needed_for(step.name for step in graph.steps.values() if self._primary in step.output_names)
        return next((f" Step {name}: {self._skipped[name]}" for name in reversed(self._skipped) if name in needed), "")

    def require_complete(self) -> None:
        """Raises GatewayError."""
        if error := self.error():
            raise error

    def finish(self) -> None:
        """The end of a stream. Without a byte so far, an error is an answer of its own."""
        error = self.error()
        if error is not None:
            if self._begun and self.send is not None:
                self.send(self.form.error(error))
            return
        self._write({} if self._begun else {"role": "assistant", "content": ""}, self._reason(), workflow=self._workflow())
        if self.form.wants_usage:
            self._write(None, usage=self._usage())
        self._pass(b"data: [DONE]\n\n")

    def completion(self) -> bytes:
        """The whole answer, as chat."""
        message = {"role": "assistant", "content": text_of(self._value)}
        choice = {"index": 0, "message": message, "finish_reason": self._reason()}
        body = self._head("chat.completion") | {"choices": [choice], "usage": self._usage(), "workflow": self._workflow()}
        return orjson.dumps(body)

    def _write(self, delta: Mapping[str, Any] | None, reason: str | None = None, **more: Any) -> None:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
        chunk = self._head("chat.completion.chunk") | {"choices": choices} | more
        self._begun = True
        self._pass(b"data: %b\n\n" % orjson.dumps(chunk))

    def _pass(self, chunk: bytes) -> None:
        if self.send is not None and (data := self.form.event(chunk)):
            self.send(data)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.run.id}", "object": kind, "created": self.run.created_at, "model": self._model}

    def _reason(self) -> str:
        one = PassingText(self._asked, self.run.scheduler.tree, self._primary).source()
        return (one.result.finish_reason if one else None) or "stop"

    def _usage(self) -> dict[str, Any]:
        usage = self.run.receipt.as_json()
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        }

    def _workflow(self) -> dict[str, Any]:
        found = self.run.as_json(steps=False)
        others = {name: value for name, value in found["outputs"].items() if name != self._primary}
        return {"run": self.run.id, "outputs": others, "usage": found["usage"]}


def _inputs(workflow: Workflow, body: Mapping[str, Any]) -> dict[str, Any]:
    """The messages go to the only input of messages, or the last text of the user to the only required text; nowhere if all
    required inputs are given.
    """
    given = body.get("workflow_inputs")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise bad_request("'workflow_inputs' must be an object.", "workflow_inputs")
    declared = {name: each for name, each in workflow.inputs.items() if name not in given}
    messages = [name for name, each in declared.items() if each.type == MESSAGES]
    texts = [name for name, each in declared.items() if each.type == "string" and each.required]
    if len(messages) == 1:
        return {**given, messages[0]: body.get("messages")}
    if not messages and len(texts) == 1:
        return {**given, texts[0]: FUNCTIONS["last_text"].call(body.get("messages") or []) or ""}
    missing = [name for name, each in declared.items() if each.required]
    if not missing:
        return dict(given)
    text = (
        f"The workflow {workflow.name!r} has no single input for the messages; give {', '.join(missing)} in 'workflow_inputs'."
    )
    raise unfit("workflow_inputs", text)
