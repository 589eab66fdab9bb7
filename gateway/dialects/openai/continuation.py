"""Joins a broken stream and its continuation: the text that the client has, and the continuation's events as its next events.

    events sent to the client ── SentText ──► TextSoFar ── request ──► another replica ── SplicedReader ──► one stream

Readers pass whole events only, so the text that the client has is known exactly. Another replica gets the same request with
this text as the beginning of the answer (`continuation_request.py`). The id, model and time of the first part replace those in
the continuation's events; its usage is replaced by that of the whole answer. Every other byte is the replica's.

Only plain text is resumed. The number of tokens so far is taken from the usage in the stream (`continuous_usage_stats`), else
one is counted for each event with text: an engine that puts several tokens into one event is asked for some too many.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.dialect import Continuation, OuterReader, StreamReader
from gateway.dialects.events.sse import MAX_PARSED_EVENT, EventData, events_of, object_of
from gateway.dialects.finished_answer import AnswerAssembler, FinishedAnswer, UnreadableAnswerError
from gateway.dialects.json_edits import Edit, Members, read_object
from gateway.dialects.openai.chat_answer import ChatAssembler
from gateway.dialects.openai.continuation_request import continue_body
from gateway.dialects.openai.request import CHAT
from gateway.dialects.openai.stream import ChunkReader, only_role
from gateway.dialects.openai.usage import parse_usage
from gateway.dialects.usage import Usage

_HEAD: Final = ("id", "object", "created", "model")


class TextSoFar(FinishedAnswer):
    """The text that a client has. head: the members that all events share, as JSON; {} before the first event. counted: the
    client has the event with only the usage.
    """

    __slots__ = ("counted", "head")

    def __init__(self) -> None:
        super().__init__()
        self.head: Mapping[str, bytes] = {}
        self.counted = False


class SentText(ChatAssembler):
    """Reads the events that a client has. They have a value only if they are one text. Half an event, as a reader passes it on
    if it is very long, cannot be continued.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.value = self._so_far = TextSoFar()
        self._kind = kind

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self.held > MAX_PARSED_EVENT:
            self.drop()

    def event(self, event: bytes) -> None:
        if len(event) > MAX_PARSED_EVENT:
            raise UnreadableAnswerError
        super().event(event)

    def finish(self) -> None:
        if self.held:
            self.drop()

    def chunk(self, chunk: dict[str, Any], text: bytes) -> None:
        so_far = self._so_far
        if not _is_text(self._kind, chunk):
            raise UnreadableAnswerError
        super().chunk(chunk, text)
        so_far.head = so_far.head or _head_of(text)
        if parse_usage(chunk):
            so_far.counted = not chunk["choices"]


def _head_of(content: bytes) -> dict[str, bytes]:
    """The members of an event that all events of its stream share, as JSON on one line."""
    head = dict[str, bytes]()
    spans = read_object(content).spans
    for name in _HEAD:
        if name in spans:
            start, end = spans[name]
            head[name] = content[start:end].replace(b"\n", b" ")
    return head


def _is_text(kind: str, answer: Mapping[str, Any]) -> bool:
    """Return whether an event has at most a text. Any other member excludes a continuation, also an unknown one."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        return False
    if not choices:
        return True
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs"):
        return False
    if kind != CHAT:
        return isinstance(choice.get("text") or "", str)
    delta = choice.get("delta") or {}
    if not isinstance(delta, dict) or any(value for name, value in delta.items() if name not in ("role", "content")):
        return False
    return isinstance(delta.get("content") or "", str)


class SplicedReader(OuterReader):
    """Turns the events of one continuation into events of the first answer. usage: of the whole answer, once it is known."""

    def __init__(self, so_far: TextSoFar, *, strip_usage: bool) -> None:
        super().__init__(ChunkReader(strip_usage=False, watchful=True))
        self._so_far = so_far
        self._strip_usage = strip_usage

    def feed(self, chunk: bytes) -> bytes:
        return self._spliced(self.inner.feed(chunk))

    def finish(self) -> bytes:
        return self._spliced(self.inner.finish())

    def _spliced(self, out: bytes) -> bytes:
        self.done, self.within_event = self.inner.done, self.inner.within_event
        self.opened, self.started = self.inner.opened, self.inner.started
        return b"".join(map(self._event, events_of(out)))

    def _event(self, event: bytes) -> bytes:
        answer = object_of(event)
        if not answer:
            return event  # a comment, or [DONE]
        choices, usage = answer.get("choices"), None
        if part := parse_usage(answer):
            self.usage = usage = self._whole(part)
            if self._strip_usage and choices == []:
                return b""
        head = self._so_far.head
        if head and isinstance(choices, list) and any(map(only_role, choices)):
            return b""
        data = EventData(event)
        members = read_object(data.text)
        complete = isinstance(choices, list)  # else it is an event of another kind, which need not have a head
        edits = [members.put(name, value) for name, value in head.items() if complete or name in members.spans]
        if usage:
            edits += _usage_edits(members, answer["usage"], usage)
        return data.edited(edits)

    def _whole(self, part: Usage) -> Usage:
        """The usage of both parts together; the text so far was part of the continuation's prompt."""
        so_far = self._so_far
        prompt = so_far.usage.prompt if so_far.usage else max(0, part.prompt - so_far.tokens)
        cached = None if part.cached is None else min(part.cached, prompt)
        written = min(part.written, prompt - (cached or 0))
        return Usage(prompt, so_far.tokens + part.completion, cached, written, min(part.hours, written))


def _usage_edits(members: Members, counts: Mapping[str, Any], usage: Usage) -> list[Edit]:
    """The edits that replace the usage of an event by that of the whole answer. counts: the engine's usage object."""
    inner = read_object(members.raw, members.spans["usage"][0])
    edits = [inner.put(name, b"%d" % value) for name, value in _totals(usage).items()]
    if usage.cached is None:
        return edits
    cached, details = b"%d" % usage.cached, counts.get("prompt_tokens_details")
    if isinstance(details, dict) and "cached_tokens" in details:
        edits.append(read_object(members.raw, inner.spans["prompt_tokens_details"][0]).put("cached_tokens", cached))
    if "prompt_cache_hit_tokens" in counts:
        edits.append(inner.put("prompt_cache_hit_tokens", cached))
    return edits


def _totals(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }


class TextContinuation(Continuation):
    """Continues a broken stream of one kind (CHAT or COMPLETION)."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def partial(self) -> AnswerAssembler:
        return SentText(self._kind)

    def request(self, body: bytes, text: str, tokens: int) -> tuple[str, list[Edit]]:
        return continue_body(self._kind, body, text, tokens)

    def reader(self, so_far: FinishedAnswer, *, strip_usage: bool) -> StreamReader:
        assert isinstance(so_far, TextSoFar)
        return SplicedReader(so_far, strip_usage=strip_usage)

    def ending(self, so_far: FinishedAnswer, usage: Usage | None) -> bytes:
        assert isinstance(so_far, TextSoFar)
        return ending(self._kind, so_far, usage)


def ending(kind: str, so_far: TextSoFar, usage: Usage | None) -> bytes:
    """The missing end of a stream whose answer is complete. usage: reported in it, if the client asked for usage."""
    if so_far.done:
        return b""
    events = list[bytes]()
    head = {name: orjson.Fragment(value) for name, value in so_far.head.items()}
    if not so_far.finish_reason:
        nothing: dict[str, Any] = {"delta": {}} if kind == CHAT else {"text": ""}
        events.append(_made({**head, "choices": [{"index": 0, **nothing, "logprobs": None, "finish_reason": "length"}]}))
    if usage and not so_far.counted:
        details = {} if usage.cached is None else {"prompt_tokens_details": {"cached_tokens": usage.cached}}
        events.append(_made({**head, "choices": [], "usage": {**_totals(usage), **details}}))
    return b"".join((*events, b"data: [DONE]\n\n"))


def _made(answer: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(answer) + b"\n\n"
