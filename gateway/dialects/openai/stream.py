"""The reader of OpenAI's streams: passes events on, notes their usage, and removes the usage that only the gateway wants.

Engines report the usage of a stream in one event before its end, if asked (`stream_options.include_usage`). The gateway always
asks; unless the client did, too, it removes that event (no choices, but usage). Members of that event beside the usage, such as
llama.cpp's `timings`, are the client's: they pass as an event with an empty choice, because clients that have not asked for
usage expect a choice in each event. Every other event passes unchanged once it is complete: so a stream that breaks off within
an event ends between two events for the client, where an error event can still follow. (Engines write whole events; only a
break shows the difference.)

A role, an empty delta and llama.cpp's `prompt_progress` are no tokens. If a broken stream is to be resumed, the engine's report
of its failure must not reach the client: a watchful reader holds it.

Pure: bytes in, bytes out. Every division of the stream into chunks gives the same bytes and the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.events.first_event import FirstEvent
from gateway.dialects.events.passed_tokens import EventSamples, texts_in
from gateway.dialects.events.reader import EventReader, has, has_any_but
from gateway.dialects.events.sse import MAX_PARSED_EVENT, data_of, events_of, object_of
from gateway.dialects.excerpt import one_line
from gateway.dialects.full_context import CODE, full_context
from gateway.dialects.openai.errors import full_context_error
from gateway.dialects.openai.usage import parse_usage
from gateway.errors import ReplicaFailure

_ERROR: Final = b'data:{"error"'  # first event, without its spaces, of an engine that failed before its first token
_USUAL: Final = (b'data: {"id"', b'data: {"object"', b'data: {"choices"')  # beginnings of nearly all streams
_END: Final = b"data: [DONE]\n\n"
_CODE: Final = b'"%b"' % CODE.encode()
_CHOICES: Final = b'"choices"'  # within a text the quotes are escaped
_FULL: Final = b'"choices":[{'  # as nearly all engines write them
_LIST_AT: Final = len(_CHOICES) + 1  # behind the colon
_BRACKET: Final = 0x5B
_END_BRACKET: Final = 0x5D
_TEXTS: Final = texts_in("content", "reasoning_content", "reasoning", "thinking", "text", "arguments", "refusal", "transcript")
_CONTENT: Final = b'"content":"'  # likewise
_QUOTE: Final = 0x22
_COMMON: Final = frozenset(["choices", "created", "id", "model", "object", "service_tier", "system_fingerprint", "usage"])
_ROLE: Final = frozenset(["role"])
_NO_TEXT: Final = {"index": 0, "text": "", "finish_reason": None}
_NO_DELTA: Final = {"index": 0, "delta": {}, "finish_reason": None}


class ChunkReader(EventReader):
    """Reads one stream. strip_usage: remove the usage event. watchful: stop at an event by which the engine reports its
    failure, also after the first token; `failure` is that report.
    """

    def __init__(self, *, strip_usage: bool, watchful: bool = False) -> None:
        super().__init__()
        self.strip_usage = strip_usage
        self._events = 0  # with choices, from the first token on
        self._samples = EventSamples()
        self._counted = 0  # events received when the usage came
        self._last = b""  # the last event with choices, and maybe others before it
        self._watchful = watchful

    def feed(self, chunk: bytes) -> bytes:
        if self._watchful and (self.failure or has(chunk, b'"error"')):
            return self.read(chunk)
        if self.started and self.are_whole(chunk) and not has(chunk, b'"usage"') and not has(chunk, b"[DONE]"):
            self.within_event = False
            if events := chunk.count(_FULL):
                self._last = chunk
            elif events := chunk.count(_CHOICES):
                self._keep(chunk)
            if events:
                self._events += events
                if self._events >= self._samples.next:
                    self._samples.add(self._events, chunk)
            return chunk  # whole events without usage or end: nearly all chunks of nearly all streams
        return self.read(chunk)

    @property
    def passed(self) -> int:
        """One token for each event with choices from the first token on, as most engines write them, or more."""
        if self.done and self.usage is not None:
            return self._events
        return self._samples.tokens(self._events, _CHOICES, _TEXTS)

    @property
    def late(self) -> bool:
        return self.usage is not None and self._events - self._counted > 1

    @property
    def finished(self) -> bool:
        """True if the last event with choices has a finish reason. O(length of its chunk), at the end of a stream."""
        for event in reversed(list(events_of(self._last))):
            if choices := _choices_of(event):
                return all(choice.get("finish_reason") for choice in choices)
        return False

    def begins(self, event: bytes) -> None:
        at = event.find(_CONTENT) + len(_CONTENT)
        if len(_CONTENT) <= at < len(event) and event[at] != _QUOTE:
            self.started = True  # the first token of nearly all streams
            return
        data = data_of(event).strip()
        if not data or data == b"[DONE]":
            return
        choices = _choices_of(event)
        if choices is None:
            self.started = event.find(_CHOICES) >= 0 and not object_of(event)  # unreadable, and so maybe a token
        else:
            self.opened = True
            for choice in choices:
                self.started = self.started or _is_output(choice)

    def failure_in(self, event: bytes) -> ReplicaFailure | None:
        if event.find(b'"error"') < 0:
            return None
        failure, data = failure_of(event), data_of(event).strip()
        if failure is None and event.find(_CODE) < 0 and (full := full_context(data)):
            self.instead = b"data: %b\n\n" % full_context_error(full, data)
        return failure

    def passes(self, event: bytes, *, unread: bool) -> bool:
        if self._watchful and (self.failure or event.find(b'"error"') >= 0):
            self.failure = self.failure or failure_of(event)
            if self.failure:
                return False
        if unread:
            return True
        if event == _END:  # nearly all ends
            self.done = True
            return True
        if len(event) <= MAX_PARSED_EVENT and event.find(b"[DONE]") >= 0 and data_of(event).strip() == b"[DONE]":
            self.done = True
        if event.find(b'"usage"') < 0:
            self._count(event)
            return True
        answer = object_of(event)
        no_text = answer.get("choices") == []
        if not no_text:
            self._count(event)
        usage = parse_usage(answer)
        if usage is None:
            return True
        self.usage, self._counted = usage, self._events
        if not (self.strip_usage and no_text):
            return True
        self.instead = _without_usage(answer)
        return False

    def _keep(self, chunk: bytes) -> None:
        """Keeps the last chunk that has choices: some engines write events without any after the finish reason."""
        if not _is_empty(chunk) or any(map(_choices_of, events_of(chunk))):
            self._last = chunk

    def _count(self, event: bytes) -> None:
        if event.find(_CHOICES) >= 0:
            self._keep(event)
            self._events += self.started
            if self.started and self._events >= self._samples.next:
                self._samples.add(self._events, event)


class SeveralReader(ChunkReader):
    """Reads a stream with several answers (`n`, a batch): without [DONE] it is whole once each of them has a finish reason."""

    def __init__(self, answers: int, *, strip_usage: bool, watchful: bool = False) -> None:
        super().__init__(strip_usage=strip_usage, watchful=watchful)
        self._answers = answers
        self._ended = set[int]()

    def feed(self, chunk: bytes) -> bytes:
        return self.read(chunk)

    @property
    def finished(self) -> bool:
        return len(self._ended) >= self._answers

    def _count(self, event: bytes) -> None:
        super()._count(event)
        for choice in _choices_of(event) or ():
            if choice.get("finish_reason") and isinstance(number := choice.get("index"), int):
                self._ended.add(number)


def _is_empty(event: bytes) -> bool:
    """True if the first `_CHOICES` of these events may be an empty list. O(length up to there)."""
    at = event.find(_CHOICES) + _LIST_AT
    if at + 2 >= len(event):
        return True
    if event[at] != _BRACKET:
        at += 1  # a space
    return event[at] == _BRACKET and event[at + 1] == _END_BRACKET


def first_event(begin: bytes) -> FirstEvent | None:
    """A reader of the first event. None: it is no error, as in nearly all streams. O(1)."""
    return None if begin.startswith(_USUAL) or not _may_fail(begin) else FirstEvent(_may_fail, failure_of)


def _may_fail(begin: bytes) -> bool:
    """True if an event with this beginning may be an engine's error. O(1)."""
    head = begin[: 2 * len(_ERROR)].replace(b" ", b"")[: len(_ERROR)]
    return _ERROR.startswith(head)


def _choices_of(event: bytes) -> list[dict[str, Any]] | None:
    """The choices of an event that has any; None if it has none."""
    choices = object_of(event).get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) and choices else None


def _is_output(choice: Mapping[str, Any]) -> bool:
    """True if a choice has a text, a call, reasoning or the ids of tokens."""
    for name in ("delta", "message"):  # some engines stream one chunk, which is written like a whole answer
        part = choice.get(name)
        if isinstance(part, dict) and has_any_but(_ROLE, part):
            return True
    return bool(choice.get("text") or choice.get("token_ids"))


def only_role(choice: Any) -> bool:
    """True if a choice has nothing but the role."""
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return False
    delta = choice.get("delta")
    return isinstance(delta, dict) and "role" in delta and not has_any_but(_ROLE, delta)


def is_opening(event: bytes) -> bool:
    """True if an event has choices, and nothing but the role in them."""
    choices = object_of(event).get("choices")
    return isinstance(choices, list) and bool(choices) and all(map(only_role, choices))


def _without_usage(answer: Mapping[str, Any]) -> bytes:
    """The usage event without the usage, with an empty choice; b"" if it has nothing else for the client."""
    if _COMMON.issuperset(answer) or not has_any_but(_COMMON, answer):
        return b""
    choice = _NO_TEXT if answer.get("object") == "text_completion" else _NO_DELTA
    rest = {name: value for name, value in answer.items() if name != "usage"}
    return b"data: " + orjson.dumps({**rest, "choices": [choice]}) + b"\n\n"


def failure_of(event: bytes) -> ReplicaFailure | None:
    """The failure that an engine's error event reports; None if the client caused the error."""
    error = object_of(event).get("error")
    if not isinstance(error, dict):
        return None
    code = error.get("code")  # the status as a number (vLLM, SGLang), a name (OpenAI), nothing
    own = 500 <= code < 600 if isinstance(code, int) else error.get("type") == "server_error"
    return ReplicaFailure("status", f"its error: {one_line(str(error.get('message')))}") if own else None
