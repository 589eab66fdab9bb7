"""The reader of OpenAI's Responses streams: passes events on, and notes their usage, numbers and end.

    response.created, response.in_progress, then the output's events, then response.completed, .incomplete or .failed

Each event has a number. The last one repeats the whole response, with the usage near its end; clients such as Codex close the
connection once they have it. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.dialects.answer import TAIL, usage_in
from gateway.dialects.events.named import ERRORS, NamedReader, name_of
from gateway.dialects.events.passed_tokens import EventSamples, texts_in
from gateway.dialects.events.reader import has_any
from gateway.dialects.events.sse import MAX_PARSED_EVENT, object_of
from gateway.dialects.excerpt import one_line
from gateway.dialects.full_context import CODE, full_context_of
from gateway.dialects.responses.usage import parse_usage
from gateway.errors import ReplicaFailure

QUIET: Final = frozenset(["response.created", "response.queued", "response.in_progress"])  # events before the first token

_COMPLETE: Final = frozenset(["response.completed", "response.incomplete"])
_READ: Final = (b"response.completed", b"response.incomplete", b"response.failed", b"event: error", b"event:error", b'"error"')
# Codes and types of errors that the client caused.
_CLIENTS: Final = frozenset(["invalid_prompt", "rate_limit_exceeded", "invalid_request_error", "context_length_exceeded"])
_DELTA: Final = b'.delta"'  # the end of an event's type; within a text the quotes are escaped
_TEXTS: Final = texts_in("delta")
_WRITTEN: Final = b'"delta":"'  # likewise
_QUOTE: Final = 0x22
_NUMBER_NAME: Final = b'"sequence_number"'
_NUMBER: Final = re.compile(rb'"sequence_number"\s{0,8}:\s{0,8}(\d{1,15})')


class ResponseReader(NamedReader):
    """Reads one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._number = -1
        self._deltas = 0
        self._samples = EventSamples()
        self._ending = False  # the last event is too long to be held, and passes unread
        self._tail = bytearray()  # its last bytes
        self._event, self._name = b"", ""  # an event before the first token, and its name, which is asked for three times

    @property
    def last_number(self) -> int:
        return self._number

    def feed(self, chunk: bytes) -> bytes:
        if self._ending:
            self._tail += chunk[-TAIL:]
            del self._tail[: -2 * TAIL]
        out = chunk
        if self.started and self.are_whole(chunk) and not has_any(chunk, _READ):
            self.within_event = False
        else:
            out = self.read(chunk)
        self._number = number_in(out, self._number)
        if self.started:
            self._deltas += out.count(_DELTA)
        if self._deltas >= self._samples.next:
            self._samples.add(self._deltas, out)
        return out

    @property
    def passed(self) -> int:
        if self.done and self.usage is not None:
            return self._deltas
        return self._samples.tokens(self._deltas, _DELTA, _TEXTS)

    def begins(self, event: bytes) -> None:
        if event.find(_DELTA) >= 0:
            at = event.find(_WRITTEN) + len(_WRITTEN)
            if len(_WRITTEN) <= at < len(event):  # nearly all streams
                self.started = event[at] != _QUOTE
                return
        name = self._name_of(event)
        if name in QUIET:
            self.opened = True
        elif name.endswith(".done"):
            self.started = True
        elif event.find(_DELTA) >= 0 or event.find(b'"name"') >= 0:
            data = object_of(event)
            item = data.get("item")
            self.started = bool(data.get("delta")) or (isinstance(item, dict) and bool(item.get("name")))

    def failure_in(self, event: bytes) -> ReplicaFailure | None:
        name = self._name_of(event)
        if name not in ERRORS:
            return None
        if words := _full_context_event(name, event):
            self.instead, self.done = words, True
            return None
        return failure_of(event)

    def _name_of(self, event: bytes) -> str:
        if event is not self._event:
            self._event, self._name = event, name_of(event)
        return self._name

    def begun(self, head: bytes) -> None:
        self._ending = name_of(head) in _COMPLETE

    def passes(self, event: bytes, *, unread: bool) -> bool:
        if unread:
            if self._ending:
                self._ended(bytes(self._tail) + event)
                self._ending = False
            return True
        name = self._name_of(event)
        self._event = b""
        if name in _COMPLETE:
            return self._ended(event)
        if name in ERRORS:
            self.reported = failure_of(event)
            self.done = self.reported is None
        return True

    def _ended(self, event: bytes) -> bool:
        """True if the last event has its response. Without one it is no valid end, and is dropped."""
        if len(event) > MAX_PARSED_EVENT:
            self.usage = usage_in(event[-TAIL:], parse_usage)
        else:
            data = object_of(event)  # {}: not parsed; the event passes
            response = data.get("response")
            if isinstance(response, dict):
                self.usage = parse_usage(response)
            elif data:
                return False
        self.done = True
        return True


def number_in(events: bytes, before: int) -> int:
    """The number of the last numbered event, else `before`. Within a text the quotes are escaped. O(length)."""
    at = events.rfind(_NUMBER_NAME)
    found = _NUMBER.match(events, at) if at >= 0 else None
    return int(found[1]) if found else before


def failure_of(event: bytes) -> ReplicaFailure | None:
    """The failure that an engine's event reports; None if the client caused the error."""
    if name_of(event) not in ERRORS:
        return None
    error = _error_in(object_of(event))
    if error.get("code") in _CLIENTS or error.get("type") in _CLIENTS or full_context_of({"error": error}):
        return None
    return ReplicaFailure("status", f"its error: {one_line(str(error.get('message')))}")


def _error_in(data: dict[str, Any]) -> dict[str, Any]:
    """The error of an event's data, which may be the data itself."""
    response = data.get("response")
    error = response.get("error") if isinstance(response, dict) else data.get("error")
    return error if isinstance(error, dict) else data


def _full_context_event(name: str, event: bytes) -> bytes:
    """An error event about a full context, with OpenAI's code; b"" for another error."""
    data = object_of(event)
    error = _error_in(data)
    if error.get("code") == CODE or not full_context_of({"error": error}):
        return b""
    if error is not data:
        error["code"] = CODE
    if name == "error":
        data["code"] = CODE
    try:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(data))
    except orjson.JSONEncodeError:  # half a surrogate pair
        return b""
