"""Server-sent events, as bytes (WHATWG HTML, section 9.2): where events end, what their data is, edits of it.

Pure. All of it is O(bytes), whatever the cutting into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.json_edits import Edit, apply

MAX_PARSED_EVENT: Final = 64 << 10  # one with usage has a few hundred bytes; what a longer one holds could stop the event loop

EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
LONGEST_END: Final = 4
ONE_TOO_MANY: Final = (b"\n\n\n", b"\r\n\n")  # the last line feed may be the first byte of the next event
_DATA: Final = b"data:"
# Comments (keep-alives of an engine that is still in prefill), reconnection times and blank lines carry no data.
_NO_DATA: Final = re.compile(rb"(?:(?::|retry:)[^\r\n]*+[\r\n]|[\r\n])*+")
_RETRY: Final = b"retry:"


def end_of(data: bytes | bytearray, searched: int = 0) -> int:
    """Where the first event ends, -1 if it is not whole. searched: no end begins before it. O(length up to there)."""
    at = data.find(b"\n\n", searched)
    if data.find(b"\r", searched, at if at >= 0 else len(data)) < 0:
        return at + 2 if at >= 0 else -1  # nearly all events; the expression takes ten times as much
    found = EVENT_END.search(data, searched)
    return found.end() if found else -1


def ends_of(data: bytes | bytearray, searched: int = 0) -> list[int]:
    """Where all events end that are whole. O(length)."""
    if data.find(b"\r", searched) >= 0:
        return [match.end() for match in EVENT_END.finditer(data, searched)]
    ends = list[int]()
    while (at := data.find(b"\n\n", searched)) >= 0:
        searched = at + 2
        ends.append(searched)
    return ends


def events_of(data: bytes) -> Iterator[bytes]:
    """The events of a stream, each with its end; the last one may lack it. Each is made when it is asked for."""
    start = 0
    for match in EVENT_END.finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def event_at(data: bytes | bytearray, at: int) -> bytes | None:
    """The event that begins there, with its end. None: it has none, or it is longer than what is parsed. O(its length)."""
    end = EVENT_END.search(data, at, at + MAX_PARSED_EVENT)
    return bytes(data[at : end.end()]) if end else None


def skipped_at(data: bytes | bytearray, at: int) -> int:
    """Where the lines end that begin there and carry no data, as far as they are in the next MAX_PARSED_EVENT bytes."""
    if data.startswith(_DATA, at):
        return at  # nearly all events
    found = _NO_DATA.match(data, at, at + MAX_PARSED_EVENT)
    return found.end() if found else at


def data_of(event: bytes) -> bytes:
    """An event's data lines."""
    # `find`, for `in` makes and drops an exception each time before it searches.
    if event.endswith(b"\n\n") and event.find(b"\r") < 0:
        lines = event.count(b"\n")
        if lines == 2 and event.startswith(b"data: "):
            return event[6:-2]  # nearly all events
        if lines == 3 and event.startswith(b"event: ") and (at := event.find(b"\ndata: ")) >= 0:
            return event[at + 7 : -2]  # nearly all others
    return b"\n".join(line[len(_DATA) :] for line in event.splitlines() if line.startswith(_DATA))


class EventData:
    """The data of an event, and a way to change it. text: its data lines, without their field name, joined by line feeds."""

    __slots__ = ("_event", "_lines", "text")

    def __init__(self, event: bytes) -> None:
        self._event = event
        self._lines = list[tuple[int, int]]()  # where in the event the data of each line begins, and its length
        parts, at = list[bytes](), 0
        for line in event.splitlines(keepends=True):
            if line.startswith(_DATA):
                content = line[len(_DATA) :].rstrip(b"\r\n")
                self._lines.append((at + len(_DATA), len(content)))
                parts.append(content)
            at += len(line)
        self.text = b"\n".join(parts)

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The event after these edits of `text`. No other byte of it changes."""
        return apply(self._event, [self._placed(edit) for edit in edits])

    def _placed(self, edit: Edit) -> Edit:
        start, end, new = edit
        first = self._place(start)
        return first, first if start == end else self._place(end - 1) + 1, new

    def _place(self, at: int) -> int:
        """Where the byte of `text` at this index is in the event. O(lines)."""
        for begin, length in self._lines:
            if at < length:
                return begin + at
            at -= length + 1
        raise IndexError("beyond the data")


def object_of(event: bytes) -> dict[str, Any]:
    """The JSON object of an event's data lines, {} if there is none, or if it is too long to be read."""
    if len(event) > MAX_PARSED_EVENT:
        return {}
    try:
        data = orjson.loads(data_of(event))
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def without_data(data: bytes) -> int:
    """How many leading bytes of a stream carry no data, be they whole lines or the begin of one: comments, mostly. O(n)."""
    if data.startswith(b"data:"):
        return 0  # nearly all streams
    found = _NO_DATA.match(data)
    end = found.end() if found else 0
    rest = data[end : end + len(_RETRY)]
    return len(data) if rest.startswith(b":") or _RETRY.startswith(rest) else end
