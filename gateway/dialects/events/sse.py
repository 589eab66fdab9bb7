"""Server-sent events as bytes (WHATWG HTML, section 9.2): their ends, their data, edits of it.

Pure. Everything is O(bytes), however the stream is divided into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.dialects.json_edits import Edit, apply
from gateway.dialects.lenient import read_json

MAX_PARSED_EVENT: Final = 64 << 10  # bytes; an event with usage has a few hundred; a longer one could block the loop

EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\r?\n|\r\r")
LONGEST_END: Final = 4
_SHORT: Final = 1 << 10  # bytes; a longer text may have so many events that their list is too large
_DATA: Final = b"data:"
# Comments (keep-alives of an engine that is still in prefill), reconnection times and blank lines carry no data.
_NO_DATA: Final = re.compile(rb"(?:(?::|retry:)[^\r\n]*+[\r\n]|[\r\n])*+")


def comment(words: str) -> bytes:
    """A comment, which clients ignore, between two events. words: one line of ASCII."""
    return b": %b\n\n" % words.encode("ascii")


def end_of(data: bytes | bytearray, searched: int = 0) -> int:
    """The offset behind the first event, -1 if it is incomplete. searched: no end begins before this offset. O(length up to
    there).
    """
    at = data.find(b"\n\n", searched)
    if data.find(b"\r", searched, at if at >= 0 else len(data)) < 0:
        return at + 2 if at >= 0 else -1  # nearly all events; the regular expression takes ten times as long
    found = EVENT_END.search(data, searched)
    return found.end() if found else -1


def ends_of(data: bytes | bytearray, searched: int = 0) -> list[int]:
    """The offsets behind all complete events. O(length)."""
    if data.find(b"\r", searched) >= 0:
        return [match.end() for match in EVENT_END.finditer(data, searched)]
    ends = list[int]()
    if len(data) <= _SHORT:  # nearly all chunks; one call instead of one for each event
        for event in data[searched:].split(b"\n\n")[:-1]:
            searched += len(event) + 2
            ends.append(searched)
        return ends
    while (at := data.find(b"\n\n", searched)) >= 0:
        searched = at + 2
        ends.append(searched)
    return ends


def events_of(data: bytes) -> Iterator[bytes]:
    """Yields the events of a stream, each with its end; the last one may lack it."""
    start = 0
    for match in EVENT_END.finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def skipped_at(data: bytes | bytearray, at: int) -> int:
    """The offset behind the lines without data that begin at `at`, within the next MAX_PARSED_EVENT bytes."""
    if data.startswith(_DATA, at):
        return at  # nearly all events
    found = _NO_DATA.match(data, at, at + MAX_PARSED_EVENT)
    return found.end() if found else at


def data_of(event: bytes) -> bytes:
    """The data lines of an event, without their field name, joined by line feeds."""
    # `find`, because `in` creates an exception object before each search.
    if event.endswith(b"\n\n") and event.find(b"\r") < 0:
        lines = event.count(b"\n")
        if lines == 2 and event.startswith(b"data: "):
            return event[6:-2]  # nearly all events
        if lines == 3 and event.startswith(b"event: ") and (at := event.find(b"\ndata: ")) >= 0:
            return event[at + 7 : -2]  # nearly all others
    return b"\n".join(line[len(_DATA) :] for line in event.splitlines() if line.startswith(_DATA))


class EventData:
    """The data of an event, which can be edited. text: its data lines, without their field name, joined by line feeds."""

    __slots__ = ("_event", "_lines", "text")

    def __init__(self, event: bytes) -> None:
        self._event = event
        self._lines = list[tuple[int, int]]()  # offset in the event and length of each line's data
        parts, at = list[bytes](), 0
        for line in event.splitlines(keepends=True):
            if line.startswith(_DATA):
                content = line[len(_DATA) :].rstrip(b"\r\n")
                self._lines.append((at + len(_DATA), len(content)))
                parts.append(content)
            at += len(line)
        self.text = b"\n".join(parts)

    def edited(self, edits: Sequence[Edit]) -> bytes:
        """The event after these edits of `text`. No other byte changes."""
        return apply(self._event, [self._placed(edit) for edit in edits])

    def _placed(self, edit: Edit) -> Edit:
        start, end, new = edit
        first = self._place(start)
        return first, first if start == end else self._place(end - 1) + 1, new

    def _place(self, at: int) -> int:
        """The offset in the event of the byte of `text` at this index. O(lines)."""
        for begin, length in self._lines:
            if at < length:
                return begin + at
            at -= length + 1
        raise IndexError("beyond the data")


def object_of(event: bytes) -> dict[str, Any]:
    """The JSON object in an event's data lines; {} if there is none, or if the event is longer than MAX_PARSED_EVENT."""
    if len(event) > MAX_PARSED_EVENT:
        return {}
    try:
        data = read_json(data_of(event))
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
