"""Translation of a dialect to OpenAI's chat: the request for the replica, and its answer.

    body ── request ──► a chat request ──► replica ──► whole answer ── answer ──► the dialect's
                                                  ├──► stream ── TranslatingReader, EventWriter ──► the dialect's events
                                                  └──► error ── error ──► the dialect's

Pure: bytes in, bytes out. What chat has no form for follows one table of rules (`rules.py`): it becomes text, is left out with
a reason, or is a GatewayError 400 that names it. Nothing is dropped silently.

The end of a stream is written when the chat stream ends ([DONE]), because its usage is known only then.

An incomplete answer must not look complete: unreadable data, a stream without a `finish_reason`, and a `finish_reason` of an
engine that gave up are failures of the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.splitter import Splitter
from gateway.dialects.events.sse import MAX_PARSED_EVENT, data_of
from gateway.dialects.finished_answer import text_in
from gateway.dialects.full_context import FullContext, full_context
from gateway.dialects.json_structure import exceeds
from gateway.dialects.lenient import BOM, read_json
from gateway.dialects.openai.chat_answer import (
    ChatPiece,
    ChatPieceReader,
    first_choice,
    is_first,
    message_in,
    stop_text,
)
from gateway.dialects.openai.stream import failure_of
from gateway.dialects.openai.usage import parse_usage, usage_in
from gateway.dialects.usage import Usage
from gateway.errors import ReplicaFailure

CHAT_PATH: Final = "/v1/chat/completions"
MAX_EVENT: Final = 1 << 20  # bytes; no engine writes such a chunk
MAX_VALUES: Final = 1 << 15  # of a long event: as `json_structure` counts them
MAX_ANSWER_VALUES: Final = 100_000  # of a whole answer

_GAVE_UP: Final = frozenset(["abort", "error"])  # reasons of vLLM and SGLang
_ERROR_NAME: Final = (b"event: error", b"event:error")


class TranslatedRequest:
    """body: the chat request. echo: JSON that the answer repeats of the request, as its dialect wants that; b"": nothing.
    left_out: parts of the request that chat has no form for, with reasons.
    """

    __slots__ = ("body", "echo", "left_out")

    def __init__(self, body: bytes, echo: bytes = b"", left_out: Sequence[str] = ()) -> None:
        self.body = body
        self.echo = echo
        self.left_out = left_out


class EventWriter:
    """Writes one answer's events, from chunks of a chat stream. Each method returns the bytes for the client.

    last_number: of the last event that has one, in dialects that number them; -1: none had.
    """

    def __init__(self) -> None:
        self.last_number = -1

    def counted(self, usage: dict[str, Any]) -> None:
        """The chat's usage as written by the engine, for counts that Usage lacks. It is unchecked."""

    def begin(self, chunk: dict[str, Any]) -> bytes:
        """The first chunk is here (its deltas come to `delta` as well)."""
        raise NotImplementedError

    def delta(self, piece: ChatPiece) -> bytes:
        """The next piece of the first choice."""
        raise NotImplementedError

    def stopped(self, text: str) -> None:
        """The stop sequence that ended the text, if the engine reports it. Called before `end`."""

    def end(self, reason: str, usage: Usage | None) -> bytes:
        """All is here. reason: chat's `finish_reason`. Raises ReplicaFailure "garbage" if something is missing after all."""
        raise NotImplementedError

    def failed(self, message: str, full: FullContext | None = None) -> bytes:
        """The engine has reported an error. Returns events at which the dialect's official clients raise. full: the error is
        about a full context.
        """
        raise NotImplementedError


class Translation:
    """One dialect. One object serves all requests."""

    name: ClassVar[str] = ""  # the dialect's

    def request(self, raw: bytes) -> TranslatedRequest:
        """The chat request for a body that the dialect has parsed (`Dialect.parse`). A stream always asks for its usage.

        Raises GatewayError 400 that names the field that cannot be translated. O(length).
        """
        raise NotImplementedError

    def answer(self, body: bytes, echo: bytes, seed: str = "", estimate: int = 0) -> bytes:
        """A whole chat completion as the dialect's answer. Raises ReplicaFailure "garbage" if it is not a chat completion.
        seed: distinguishes the answer's ids from other requests' ids, because engines repeat ids. estimate: of the prompt's
        tokens, where the engine does not report them.
        """
        raise NotImplementedError

    def error(self, status: int, body: bytes, request_id: str = "") -> bytes:
        """The body of a replica's error in the dialect's format. body: the replica's body, cut to a few kB."""
        raise NotImplementedError

    def writer(self, echo: bytes, seed: str = "", estimate: int = 0) -> EventWriter:
        raise NotImplementedError

    def reader(self, echo: bytes, seed: str = "", estimate: int = 0) -> TranslatingReader:
        """For one answer's stream."""
        return TranslatingReader(self.writer(echo, seed, estimate))


class TranslatingReader(StreamReader):
    """Reads a chat stream, event by event, and returns events in the dialect of its writer. O(bytes)."""

    def __init__(self, writer: EventWriter) -> None:
        super().__init__()
        self.writer = writer
        self._splitter = Splitter()
        self._begun = False
        self._messages = ChatPieceReader()
        self._reason = ""
        self._deltas = 0  # from the first token on
        self._counted = 0  # deltas that had come when the usage came

    @property
    def passed(self) -> int:
        return self._deltas

    @property
    def late(self) -> bool:
        return self.usage is not None and self._deltas - self._counted > 1

    @property
    def last_number(self) -> int:
        return self.writer.last_number

    def feed(self, chunk: bytes) -> bytes:
        """Raises ReplicaFailure "garbage" for an event beyond MAX_EVENT or without valid JSON, for errors of the writer, and
        for an answer that the engine gave up.
        """
        out = [self._event(event) for event in self._splitter.feed(chunk)]
        if self._splitter.held > MAX_EVENT:
            raise _too_large()
        return b"".join(out)

    def finish(self) -> bytes:
        rest = self._splitter.finish()
        out = self._event(rest) if rest else b""
        return out + self._end() if self._reason and not (self.done or self.reported) else out

    def _event(self, event: bytes) -> bytes:
        if self.done or self.reported or self.failure:
            return b""
        if event.startswith(b":") and event.find(b"data:") < 0:
            return event  # a comment keeps the client's connection alive
        if data_of(event).strip() == b"[DONE]":
            if not self._reason:
                raise ReplicaFailure("garbage", "the stream ends without a finish_reason")
            return self._end()
        chunk = _chunk_of(event)
        error = chunk.get("error")
        if not error and (chunk.get("object") == "error" or event.startswith(_ERROR_NAME)):
            error = chunk
        if error:
            return self._error(error, event)
        self._count(chunk)
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            return b""
        out = self._opened(chunk)
        choice = first_choice(chunk)
        if choice and is_first(choice):
            if message := message_in(choice):
                piece = self._messages.read(message)
                self.started = self.started or bool(piece.text or piece.reasoning or piece.calls or piece.refusal)
                self._deltas += self.started
                out += self.writer.delta(piece)
            if reason := text_in(choice, "finish_reason"):
                require_finished(reason)
                self._reason = reason
                if stop := stop_text(choice):
                    self.writer.stopped(stop)
        return out

    def _error(self, error: Any, event: bytes) -> bytes:
        failure = failure_of(event)
        if failure and not self.started:
            self.failure = failure
            return b""
        self.reported = failure
        self.done = failure is None  # the client's own fault, which it reads in the event
        message = error.get("message") if isinstance(error, dict) else error
        full = full_context(data_of(event).strip()) if self.done else None  # SGLang reports it in a stream
        return self.writer.failed(message if isinstance(message, str) else "The engine has failed.", full)

    def _count(self, chunk: dict[str, Any]) -> None:
        usage = parse_usage(chunk)
        if usage:
            self.usage, self._counted = usage, self._deltas
            self.writer.counted(usage_in(chunk))

    def _opened(self, chunk: dict[str, Any]) -> bytes:
        if self._begun:
            return b""
        self._begun = self.opened = True
        return self.writer.begin(chunk)

    def _end(self) -> bytes:
        out = self.writer.end(self._reason, self.usage)
        self.done = True  # not before: `end` may find that something is missing
        return out


class WholeChat:
    """A whole chat completion. Raises ReplicaFailure "garbage" if the body is none, or was given up. reason: "" without one."""

    def __init__(self, body: bytes) -> None:
        if exceeds(body, MAX_ANSWER_VALUES):
            raise ReplicaFailure("garbage", f"the answer has more than {MAX_ANSWER_VALUES} values")
        try:
            answer = read_json(body)
        except ValueError as error:
            raise ReplicaFailure("garbage", "the answer is not JSON") from error
        choice = first_choice(answer) if isinstance(answer, dict) else None
        message = choice.get("message") if choice else None
        if not choice or not isinstance(message, dict):
            raise ReplicaFailure("garbage", "the answer is no chat completion")
        self.answer: dict[str, Any] = answer
        self.message = ChatPieceReader().read(message, whole=True)
        self.reason, self.stop = text_in(choice, "finish_reason"), stop_text(choice)
        self.usage = parse_usage(answer)
        require_finished(self.reason)


def require_finished(reason: str) -> None:
    """Raises ReplicaFailure for a `finish_reason` of an answer that is neither whole nor cut where the request wanted that."""
    if reason in _GAVE_UP:
        raise ReplicaFailure("garbage", f"it gave the answer up (finish_reason {reason!r})")


def _chunk_of(event: bytes) -> dict[str, Any]:
    """The chunk of an event; {} without data. Long events are parsed, too, because some engines write all arguments of a tool
    call at once.
    """
    if len(event) > MAX_EVENT or (len(event) > MAX_PARSED_EVENT and exceeds(event, MAX_VALUES)):
        raise _too_large()
    data = data_of(event.removeprefix(BOM)).strip()
    if not data:
        return {}
    try:
        chunk = read_json(data)
    except ValueError as error:
        raise ReplicaFailure("garbage", "an event whose data is no JSON") from error
    return chunk if isinstance(chunk, dict) else {}


def _too_large() -> ReplicaFailure:
    return ReplicaFailure("garbage", f"an event of more than {MAX_EVENT} bytes, or {MAX_VALUES} values")
