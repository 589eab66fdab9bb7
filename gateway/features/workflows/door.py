"""A workflow as a model: `model: "workflow:NAME"` in OpenAI's chat, and by translation in Messages and Responses.

    body (chat, or translated to chat) ──► inputs ──► run ──► its primary output: the assistant's text, streamed or whole
                                                          └──► other outputs: member `workflow` of the answer or its last chunk

The text of a step that yields the primary output passes as it comes, once no step can kill it any more; any other primary
output comes in one piece. Until the first byte of text nothing has been sent, so that a failure has the status of its step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from uuid import uuid4

import orjson

from gateway.core import Core
from gateway.dialects.body import json_object
from gateway.dialects.dialect import StreamReader
from gateway.dialects.openai.request import CHAT
from gateway.errors import GatewayError, bad_request, shutting_down
from gateway.features.runs.event_log import EventLog, Logs
from gateway.features.translation.answers import TranslatedAnswers
from gateway.features.translation.table import TRANSLATIONS
from gateway.features.translation.translation import Translation
from gateway.features.workflows.directory import PREFIX
from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.functions import FUNCTIONS
from gateway.features.workflows.language.inputs import MESSAGES
from gateway.features.workflows.language.values import text_of
from gateway.features.workflows.language.workflow import RunLimits, Workflow
from gateway.features.workflows.run_request import PlannedRun, RunRequestBody, RunRequests
from gateway.features.workflows.running.event_stream import EventSender
from gateway.features.workflows.running.messages import RunEvent
from gateway.features.workflows.running.run import WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.features.workflows.running.scheduler import COMPLETED
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.phases.replies import JSON_LINE, STREAM_LINES

Perform = Callable[[WorkflowRun, PlannedRun], Awaitable[None]]

_REFUSED: Final = ("tools", "functions", "response_format", "logprobs", "top_logprobs")
_KNOWN: Final = frozenset(
    ["model", "messages", "stream", "stream_options", "workflow_inputs", "user", "metadata", "store", "n"]
)
_INLINE_BYTES: Final = 1 << 16  # largest body that is translated in the event loop


class WorkflowDoor:
    """Answers chat requests whose model is a workflow. perform: runs and counts a run."""

    def __init__(self, core: Core, requests: RunRequests, services: RunServices, logs: Logs, perform: Perform) -> None:
        self._core, self._requests, self._services, self._logs, self._perform = core, requests, services, logs, perform

    async def answer(self, exchange: Exchange) -> ClientReply:
        """Raises GatewayError or DocumentError."""
        form = await self._form(exchange)
        name = exchange.api.model.removeprefix(PREFIX)
        exchange.record.subject.model = exchange.api.model
        body = RunRequestBody(name, "", None, exchange.api.stream, RunLimits(), {})
        planned = await self._requests.planned(body, exchange)
        primary = planned.workflow.primary
        if primary is None:
            raise _unfit("model", f"The workflow {name!r} names no primary output, which would be the answer's text.")
        body = body._replace(inputs=_inputs(planned.workflow, form.body))
        see_replicas = self._core.access.is_operator(exchange.request)
        passed = _passed_step(planned.workflow, primary)
        order = self._requests.order(planned, body, see_replicas=see_replicas, passed=passed)
        answer = DoorAnswer(exchange, form, primary, passed)
        if exchange.api.stream:
            return await self._streamed(exchange, planned, order, answer)
        run = answer.run = self._run(exchange, order, answer.take)
        await self._perform(run, planned)
        answer.require_complete()
        body_bytes = form.whole(answer.completion())
        return self._begun(exchange, body_bytes, JSON_LINE, answer)

    def _run(self, exchange: Exchange, order: RunOrder, emit: Callable[[int, RunEvent], None]) -> WorkflowRun:
        return WorkflowRun(f"run_{uuid4().hex}", order, exchange.request, self._services, emit)

    def _begun(self, exchange: Exchange, body: bytes | None, lines: bytes, answer: DoorAnswer) -> ClientReply:
        record = exchange.record
        record.status = 200
        if answer.form.ignored:
            lines += f"X-Warmroute-Ignored: {', '.join(answer.form.ignored)}\r\n".encode("ascii", "replace")
        reply = self._core.replies.begin(exchange, 200, body, lines)
        record.answer.ok = record.answer.complete = True
        return reply

    async def _streamed(self, exchange: Exchange, planned: PlannedRun, order: RunOrder, answer: DoorAnswer) -> ClientReply:
        lease = exchange.request.lease.account.lease()
        run = answer.run = self._run(exchange, order, answer.take)
        key = ("", run.id)
        log = self._logs.open(key, lease)
        answer.send = lambda data: self._logs.add(log, data)

        async def perform() -> None:
            try:
                await self._perform(run, planned)
                answer.finish()
            finally:
                log.end()

        running = asyncio.get_running_loop().create_task(perform(), name=run.id)
        exchange.record.subject.stream = True
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
        try:
            await EventSender(log, reply).run(self._core.live.patience_s)
        except GatewayError as error:  # the client was too slow
            reply.write(answer.form.error(error))
        except asyncio.CancelledError:
            if not self._core.running.over:
                raise  # the client left
            reply.end(answer.form.error(shutting_down()))

    async def _form(self, exchange: Exchange) -> DoorForm:
        """The request as chat, and its answers in the client's dialect. Raises GatewayError 400."""
        name, raw = exchange.dialect.name, exchange.api.body
        exchange.api.body = b""
        if name == CHAT:
            return DoorForm(exchange, orjson.loads(raw), None)
        translation = TRANSLATIONS.get(name)
        if translation is None:
            raise _unfit("model", f"A workflow answers chat, Messages and Responses, not {exchange.record.path[:60]}.")
        if len(raw) > _INLINE_BYTES:
            echo, body = await asyncio.to_thread(_as_chat, translation, raw)
        else:
            echo, body = _as_chat(translation, raw)
        return DoorForm(exchange, body, TranslatedAnswers(translation, echo, exchange.record.id, 0))


def _as_chat(translation: Translation, raw: bytes) -> tuple[bytes, dict[str, Any]]:
    """The request as chat, after the part of it that its answer repeats. Raises GatewayError 400."""
    request = translation.request(raw)
    body: dict[str, Any] = orjson.loads(request.body)
    given = json_object(raw).get("workflow_inputs")  # no member of these APIs
    return request.echo, body if given is None else body | {"workflow_inputs": given}


class DoorForm:
    """The form of a client's request: its members as chat, and its answer's form. ignored: members without effect."""

    def __init__(self, exchange: Exchange, body: Mapping[str, Any], answers: TranslatedAnswers | None) -> None:
        """Raises GatewayError 400 for members that a workflow cannot fulfil."""
        for key in _REFUSED:
            if body.get(key):
                raise _unfit(key, f"A workflow has its own steps: {key!r} is not possible here.")
        if body.get("n") not in (None, 1):
            raise _unfit("n", "A workflow gives one answer: 'n' must be 1.")
        self.body = body
        self.ignored = [key for key in body if key not in _KNOWN and key.isidentifier()] if answers is None else []
        self._exchange = exchange
        self._answers = answers
        self._reader: StreamReader | None = None
        options = body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        self.wants_usage = answers is not None or (asked and not exchange.api.strip_usage)

    def event(self, chunk: bytes) -> bytes:
        """An event of a chat stream, for the client. b"": nothing yet."""
        if self._answers is None:
            return chunk
        if self._reader is None:
            self._reader = self._answers.reader(self._exchange.api, watchful=False)
        return self._reader.feed(chunk)

    def whole(self, completion: bytes) -> bytes:
        return completion if self._answers is None else self._answers.whole(completion)

    def error(self, error: GatewayError) -> bytes:
        return self._exchange.dialect.error_event(error, self._reader) or b""


class DoorAnswer:
    """The answer of one run: takes its events. run, send: set before it begins; send: None: the answer comes as a whole."""

    run: WorkflowRun

    def __init__(self, exchange: Exchange, form: DoorForm, primary: str, passed: str) -> None:
        self.form = form
        self.send: Callable[[bytes], None] | None = None
        self._model = exchange.api.alias or exchange.api.model
        self._primary, self._passed = primary, passed
        self._held: list[str] = []
        self._done = self._certain = self._begun = False

    def take(self, _number: int, event: RunEvent) -> None:
        """An event of the run."""
        name = event.data.get("name")
        if name == self._primary:
            if event.kind == "output.delta":
                self._held.append(event.data["text"])
            elif event.kind in ("output.reset", "output.retracted"):
                self._held.clear()
                self._done = False
            elif event.kind == "output.done":
                self._done = True
                self._certain = not event.data["provisional"]
                if not self._passed:
                    self._held.append(text_of(event.data["value"]))
            elif event.kind == "output.confirmed":
                self._certain = True
        if self.send is not None and self._held and self._may_pass():
            text = "".join(self._held)
            self._held.clear()
            self._write({"content": text} if self._begun else {"role": "assistant", "content": text})

    def _may_pass(self) -> bool:
        if not self._passed:
            return self._certain
        tree = self.run.scheduler.tree
        one = tree.find(self._passed, ())
        return one is not None and not tree.may_be_killed(one)

    def error(self) -> GatewayError | None:
        """The reason why there is no complete answer; None: there is."""
        scheduler = self.run.scheduler
        if scheduler.status == COMPLETED:
            if self._done:
                return None
            text = f"The workflow has ended without its primary output {self._primary!r}."
            return GatewayError(502, "workflow_door", text)
        failure = scheduler.error
        if failure is not None:
            status = failure.status if failure.status >= 400 else 502
            retry = round(failure.retry_after_s) if failure.retry_after_s else None
            where = f"step {scheduler.failed_step}: " if scheduler.failed_step else ""
            return GatewayError(status, failure.cause or failure.code, f"{where}{failure.message}", retry_after_s=retry)
        return GatewayError(504, scheduler.reason or scheduler.status, f"A limit has ended the run ({scheduler.reason}).")

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
        text = "".join(self._held)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self._reason()}
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
        one = self.run.scheduler.tree.find(self._passed, ()) if self._passed else None
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


def _passed_step(workflow: Workflow, primary: str) -> str:
    """The step whose text is the primary output; "": the output comes in one piece."""
    sources = [step for step in workflow.graph.steps.values() if step.output is not None and step.output.name == primary]
    if len(sources) != 1 or workflow.outputs is not None:
        return ""
    (step,) = sources
    plain = isinstance(step.work, ModelCall) and step.work.constraint is None and step.replacement is None
    return step.name if plain and step.output is not None and step.output.value is None else ""


def _inputs(workflow: Workflow, body: Mapping[str, Any]) -> dict[str, Any]:
    """The messages go to the only input of messages, or the last text of the user to the only required text."""
    given = body.get("workflow_inputs") or {}
    if not isinstance(given, dict):
        raise bad_request("'workflow_inputs' must be an object.", "workflow_inputs")
    declared = {name: each for name, each in workflow.inputs.items() if name not in given}
    messages = [name for name, each in declared.items() if each.type == MESSAGES]
    texts = [name for name, each in declared.items() if each.type == "string" and each.required]
    if len(messages) == 1:
        return {**given, messages[0]: body.get("messages")}
    if not messages and len(texts) == 1:
        return {**given, texts[0]: FUNCTIONS["last_text"].call(body.get("messages") or []) or ""}
    text = f"The workflow {workflow.name!r} has no single input for the messages; give its inputs in 'workflow_inputs'."
    raise _unfit("workflow_inputs", text)


def _unfit(param: str, message: str) -> GatewayError:
    return GatewayError(400, "workflow_door", message, param=param)
