"""The request of a step, and the reply that receives its answer: an ordinary request of the caller, without a socket."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import orjson

from gateway.admission.memory import MemoryLease
from gateway.admission.pool_queue import MAX_PRIORITY, granted_priority
from gateway.dialects.finished_answer import CALL, MAX_ANSWER, REASONING, TEXT, AnswerAssembler, AnswerPart, FinishedAnswer
from gateway.errors import INSUFFICIENT_QUOTA, GatewayError
from gateway.features.workflows.running.messages import ModelAnswer, StepContext, StepFailure
from gateway.request.client import ClientReply, ClientRequest, Headers, InternalRequest
from gateway.request.priority import PRIORITY_HEADER
from gateway.request.rights import Rights
from gateway.upstream.client import PausableSource

MAX_ERROR: Final = 64 << 10  # bytes of an error's body

_DROPPED: Final = re.compile(rb"(?im)^(?:content-[^:\r\n]*|idempotency-key|prompt-log|x-priority):[^\n]*\n")
_OF_ITS_BODY: Final = frozenset(["Idempotency-Key", "Prompt-Log"])
_STREAM: Final = re.compile(rb"(?:^|\n)content-type: ?text/event-stream", re.IGNORECASE)
_RETRY: Final = re.compile(rb"(?:^|\n)retry-after: ?(\d{1,6})\r?\n", re.IGNORECASE)
_UNFIT: Final = re.compile(r"response_format|json_schema|structured|guided|grammar|constrain", re.IGNORECASE)
_REPEATED: Final = frozenset([408, 429])


class StepRequest(InternalRequest):
    """killed: a step of its run has killed it, which is no error."""

    def __init__(
        self,
        asked: ClientRequest,
        id_: str,
        path: str,
        lease: MemoryLease,
        reply: StepReply,
        context: StepContext,
    ) -> None:
        super().__init__(asked, id_, lambda: reply, lease, path)
        self.fields, self.made_for = context.fields, context.notes
        self.killed = False
        self.headers = self._headers = _StepHeaders(self.headers)
        self._lines = _DROPPED.sub(b"", self._lines) + b"Content-Type: application/json\r\n"

    def yield_to_certain(self, grant: Rights | None) -> None:
        """Have it wait one priority below the others of its caller (`Target.wait`). grant: the caller's."""
        given = self.headers.get(PRIORITY_HEADER)
        try:
            own = granted_priority(given, None if grant is None else grant.priority)
        except GatewayError:
            return  # it is refused
        self._headers.priority = str(max(-MAX_PRIORITY, own - 1))

    @property
    def cancelled(self) -> bool:
        return self.killed


class _StepHeaders:
    """The headers of the client's request, without those about its own body. priority: in place of the client's."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self.priority: str | None = None

    def get(self, name: str, /) -> str | None:
        if name == PRIORITY_HEADER and self.priority is not None:
            return self.priority
        return None if name in _OF_ITS_BODY else self._headers.get(name)


class StepReply(ClientReply):
    """Assembles the answer of one attempt. stream: called with each piece of text; "": the first sign of an answer."""

    def __init__(self, assembler: AnswerAssembler, lease: MemoryLease, stream: Callable[[str], None]) -> None:
        super().__init__()
        self.keep_alive = True
        self.status = 0
        self._assembler = assembler
        self._lease = lease
        self._stream = stream
        self._streams = self._ended = False
        self._body = bytearray()
        self._retry_after_s: float | None = None
        self._sent: dict[AnswerPart, int] = {}
        self._received = 0

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        self.begun, self.status = True, status
        self._streams = status == 200 and _STREAM.search(headers) is not None
        found = _RETRY.search(headers)
        self._retry_after_s = float(found[1]) if found else None
        self._body.clear()
        self._received = 0
        self.write(first)
        if length is not None and length == len(first):
            self._ended = True

    def write(self, data: bytes) -> None:
        """Raises GatewayError 503 without memory."""
        if not data:
            return
        self._received += len(data)
        if not self._streams:
            most = MAX_ERROR - len(self._body) if self.status != 200 else len(data)
            self._lease.charge(len(data))
            self._body += data[:most]
            return
        before = self._assembler.size
        self._assembler.feed(data)
        self._lease.charge(max(0, self._assembler.size - before))
        self._stream(self._fresh_text())

    def end(self, last: bytes = b"") -> None:
        self.write(last)
        self._ended = True
        if self._streams:
            self._assembler.finish()
            if text := self._fresh_text():
                self._stream(text)

    def cut(self) -> None:
        self._ended = False

    def feed_from(self, answer: PausableSource | None) -> None:
        """Nothing pauses the replica: a step runs on whether its events are read or not."""

    def outcome(self, *, constrained: bool, by_replica: bool) -> ModelAnswer | StepFailure:
        """After the request is over. constrained: its answer had to keep a shape. by_replica: False: it is the gateway's."""
        if self.status != 200:
            return self._refusal(constrained=constrained, by_replica=by_replica)
        if not self._streams and self._ended:
            self._assembler.read(bytes(self._body))
        answer = self._assembler.answer()
        if answer is None and self._received > MAX_ANSWER:
            return StepFailure("value_too_large", f"The answer has more than {MAX_ANSWER >> 20} MiB.")
        if answer is None:
            text = "The answer cannot be read: it is of another form, or has half of a character."
            return _failed(502, "unreadable_answer", text, repeat=True)
        if not (self._ended and answer.whole):
            return _failed(502, "incomplete_answer", "The answer broke off.", repeat=True)
        return model_answer(answer)

    def _refusal(self, *, constrained: bool, by_replica: bool) -> StepFailure:
        status = self.status or 502
        try:
            error = orjson.loads(bytes(self._body))["error"]
            message, code = str(error["message"])[:2000], str(error.get("code") or error.get("type") or "")[:100]
            param = str(error.get("param") or "")[:100]
        except (ValueError, KeyError, TypeError, AttributeError):
            message, code, param = f"The request was answered with status {status}.", "", ""
        if status == 400 and constrained and (_UNFIT.search(message) or _UNFIT.search(param)):
            return StepFailure("constraint_unsupported", message, status, cause=code)
        waits = status == 429 and code == "rate_limit_exceeded" and not by_replica
        repeat = (status >= 500 or status in _REPEATED) and code != INSUFFICIENT_QUOTA
        return _failed(status, code, message, repeat=repeat, waits=waits, retry_after_s=self._retry_after_s)

    def _fresh_text(self) -> str:
        """The text since the last call. O(parts)."""
        answer = self._assembler.answer()
        fresh = []
        for part in answer.of(TEXT) if answer else ():
            sent = self._sent.get(part, 0)
            if len(part.written) > sent:
                fresh.append(part.written[sent:].decode("utf-8", "replace"))
                self._sent[part] = len(part.written)
        return "".join(fresh)


def _failed(
    status: int, cause: str, message: str, *, repeat: bool = False, waits: bool = False, retry_after_s: float | None = None
) -> StepFailure:
    return StepFailure("step_failed", message, status, repeat, waits, retry_after_s, cause=cause)


def failure_of(error: GatewayError) -> StepFailure:
    """The failure of a step by an error of the gateway itself."""
    return _failed(error.status, error.code, error.message, repeat=not error.permanent, retry_after_s=error.retry_after_s)


def model_answer(answer: FinishedAnswer) -> ModelAnswer:
    """The answer as a step has it: its message has the reasoning under the engine's own name."""
    calls = [
        {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}} for part in answer.of(CALL)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    for part in answer.of(REASONING):
        message[part.name or "reasoning"] = message.get(part.name or "reasoning", "") + part.text
    if calls:
        message["tool_calls"] = calls
    return ModelAnswer(answer.text, message, calls, answer.finish_reason)
