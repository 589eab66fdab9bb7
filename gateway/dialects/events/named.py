"""Streams whose events have names.

Engines begin such a stream with events that only confirm the request (`response.created`, `message_start`, `ping`), some of
them before the prompt is computed: they are no tokens.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from gateway.dialects.events.first_event import MAX_NAMED as _MAX_HEAD
from gateway.dialects.events.first_event import FailureOf, FirstEvent
from gateway.dialects.events.reader import EventReader
from gateway.dialects.events.sse import data_of, object_of

ERRORS: Final = frozenset(["error", "response.failed"])

_NAME: Final = re.compile(rb"[\r\n]*+(?:[^\r\n]++[\r\n]++)*?event:[ ]?([^\r\n]*)[\r\n]")
_USUAL: Final = b"event: "
_FIELD: Final = b"event:"
_DATA: Final = b"data:"


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


def first_event(begin: bytes, failure_of: FailureOf) -> FirstEvent | None:
    """A reader of the first event. None: it is no error, as in nearly all streams. O(1)."""
    return FirstEvent(_may_fail, failure_of) if _may_fail(begin) else None


def _may_fail(begin: bytes) -> bool:
    """True if an event with this beginning may be an error: by its name, or because it has none yet. O(1)."""
    if begin.startswith(_FIELD):
        found = _NAME.match(begin, 0, _MAX_HEAD)
        return found[1].decode("ascii", "replace") in ERRORS if found else len(begin) < _MAX_HEAD
    return begin.startswith(_DATA) or _FIELD.startswith(begin) or _DATA.startswith(begin)
