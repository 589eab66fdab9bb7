"""Streams whose events have names: the names of events, and the beginning of a stream before its first token.

Engines begin such a stream with events that only confirm the request (`response.created`, `message_start`, `ping`), some of
them before the prompt is computed. Until an event with output comes, nothing is sent to the client, so the request can go to
another replica.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Final

import orjson

from gateway.dialects.dialect import StreamOpening
from gateway.dialects.events.reader import EventReader
from gateway.dialects.events.sse import LONGEST_END, data_of, end_of, object_of, skipped_at
from gateway.errors import ReplicaFailure

# Bytes; `response.created` repeats the instructions and tools of its request. A connection holds at most twice as many unread.
MAX_OPENING: Final = 128 << 10
ERRORS: Final = frozenset(["error", "response.failed"])

_NAME: Final = re.compile(rb"[\r\n]*+(?:[^\r\n]++[\r\n]++)*?event:[ ]?([^\r\n]*)[\r\n]")
_MAX_HEAD: Final = 300  # bytes at the start of an event that are searched for its name
_USUAL: Final = b"event: "
_FIELD: Final = b"event:"
_DATA: Final = b"data:"

FailureOf = Callable[[bytes], ReplicaFailure | None]
"""Reads the engine's failure from an error event; None for other events."""


def name_of(event: bytes) -> str:
    """The name of an event, or else the `type` in its data; "" if it has neither. O(1), except for an event without a name.

    A type written with escapes is ignored: readers look for names in the bytes before they parse an event.
    """
    if event.startswith(_USUAL):  # nearly all events; the regular expression takes ten times as long
        end = event.find(b"\n", len(_USUAL), _MAX_HEAD)
        if end >= 0 and event.find(b"\r", len(_USUAL), end) < 0:
            return event[len(_USUAL) : end].decode("ascii", "replace")
    found = _NAME.match(event, 0, _MAX_HEAD)
    if found:
        return found[1].decode("ascii", "replace")
    kind = object_of(event).get("type")
    return kind if isinstance(kind, str) and event.find(b'"%b"' % kind.encode()) >= 0 else ""


def has_name(event: bytes) -> bool:
    """True if the event has a field with its name; clients of some APIs ignore an event that only has a type. O(1)."""
    return _NAME.match(event, 0, _MAX_HEAD) is not None


class NamedReader(EventReader):
    """Reads a stream of named events, each with a JSON object. A stream that ends within an event is incomplete."""

    def is_cut(self, rest: bytes) -> bool:
        if self.within_event:
            return not rest.rstrip().endswith(b"}")
        try:
            return not isinstance(orjson.loads(data_of(rest)), dict)  # once in a stream, and of 1 MiB at most
        except orjson.JSONDecodeError:
            return True


class NamedOpening(StreamOpening):
    """Reads the beginning of a stream, up to an event that is none of the `quiet` ones. O(bytes)."""

    most: ClassVar[int] = 2 * MAX_OPENING  # never reached: beyond MAX_OPENING the stream has begun

    def __init__(self, quiet: frozenset[str], failure_of: FailureOf) -> None:
        super().__init__()
        self._quiet = quiet
        self._failure_of = failure_of
        self._data = bytearray()  # from the beginning of an event that is not complete yet
        self._searched = 0
        self._seen = 0

    def feed(self, data: bytes) -> bool:
        self._seen += len(data)
        self._data += data
        while self._data and self._seen <= MAX_OPENING:
            begin = skipped_at(self._data, 0)
            if begin:
                del self._data[:begin]
                self._searched = 0
                continue
            end = end_of(self._data, self._searched)
            if end < 0:
                self._searched = max(0, len(self._data) - LONGEST_END + 1)
                return self._is_loud()
            event = bytes(self._data[:end])
            if name_of(event) not in self._quiet:
                if failure := self._failure_of(event):
                    raise failure
                self.silent = False
                return True
            del self._data[:end]
            self._searched = 0
        return self._seen > MAX_OPENING

    def _is_loud(self) -> bool:
        """True if the name of the incomplete event shows that it is neither quiet nor an error."""
        found = _NAME.match(self._data, 0, _MAX_HEAD)
        if found is None:
            return False
        name = found[1].decode("ascii", "replace")
        self.silent = name in self._quiet
        return not self.silent and name not in ERRORS
