"""The stream tap: reads an SSE stream as it passes, and takes out the event that only the gateway asked for.

Engines report the usage of a stream in one event before the end, if asked (`stream_options.include_usage`). The gateway
always asks; if the client had not, that event (no choices, but usage) is not for it and is left out. Every other event goes
on as it came, as soon as it is whole: so a stream that breaks off in the middle of an event ends between two events for the
client, where an error can still be told. (Engines write whole events; only a break shows the difference.)

Where a broken stream is to be resumed, an engine's own word of its failure must not go on either: `feed_closely` keeps it.

Pure: bytes in, bytes out. Any cutting of the stream into chunks gives the same bytes and the same findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson

from gateway.api.splice import Edit, apply
from gateway.errors import ReplicaFailure
from gateway.excerpt import one_line
from gateway.metering import Usage, parse_usage

# An event beyond this is passed on unread, so that memory stays bounded. Not Final: a test makes it smaller.
MAX_EVENT_BYTES = 1 << 20
MAX_PARSED_EVENT: Final = 64 << 10  # one with usage has a few hundred bytes; what a longer one holds could stop the event loop
MAX_ERROR_BYTES: Final = 64 << 10  # nobody waits for the end of a longer one
MAX_COMMENT_BYTES: Final = 16 << 10  # before a stream's first data: a keep-alive each second is 3 kB in five minutes

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LONGEST_END: Final = 4
_ONE_TOO_MANY: Final = (b"\n\n\n", b"\r\n\n")  # the last line feed may be the first byte of the next event
_DATA: Final = b"data:"
_ERROR: Final = b'data:{"error"'  # how the first event of an engine that failed before its first token begins, less its spaces
# Comments (keep-alives of an engine that is still in prefill), reconnection times and blank lines carry no data.
_NO_DATA: Final = re.compile(rb"(?:(?::|retry:)[^\r\n]*+[\r\n]|[\r\n])*+")
_RETRY: Final = b"retry:"


class StreamTap:
    """One stream's tap: `feed` it, or `feed_closely`, not both in turn.

    usage: what the stream has reported so far; done: it has said [DONE]; failure: by its own words, to one who looks closely.
    """

    def __init__(self, strip_usage: bool) -> None:
        self.strip_usage = strip_usage
        self.usage: Usage | None = None
        self.done = False
        self.failure: ReplicaFailure | None = None
        self._closely = False
        self._held: bytes | bytearray = b""  # an event that is not whole yet
        self._too_long = False  # the head of the held event was passed on already

    @property
    def within_event(self) -> bool:
        """Whether the head of an event was passed on, and its end was not: what follows would be taken for a part of it."""
        return self._too_long

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the stream; returns what may go to the client now."""
        whole = not self._held and chunk.endswith(b"\n\n") and not chunk.endswith(_ONE_TOO_MANY)
        # `find`, for `in` makes and drops an exception each time before it looks.
        if whole and chunk.find(b'"usage"') < 0 and chunk.find(b"[DONE]") < 0:
            self._too_long = False
            return chunk  # whole events without anything of ours in them: nearly all chunks of nearly all streams
        return self._read(chunk)

    def feed_closely(self, chunk: bytes) -> bytes:
        """Like `feed`, but an event by which the engine says that it has failed does not pass, nor what follows it."""
        self._closely = True
        return self._read(chunk) if self.failure or chunk.find(b'"error"') >= 0 else self.feed(chunk)

    def raise_failure(self) -> None:
        """Raises ReplicaFailure if the engine has said that it failed."""
        if failure := self.failure:
            # Another one, for what is raised refers to the frames that it passed, and they to this tap.
            raise ReplicaFailure(failure.reason, failure.message, reached=failure.reached)

    def _read(self, chunk: bytes) -> bytes:
        data, looked = chunk, 0
        if self._held:  # O(chunk) until the event is whole, for it may come byte by byte
            # An event's end may straddle the last chunk and this one: look again at the last bytes.
            looked = max(0, len(self._held) - _LONGEST_END + 1)
            if not isinstance(self._held, bytearray):
                self._held = bytearray(self._held)
            self._held += chunk
            if not _EVENT_END.search(self._held, looked):
                return self._overflow()
            data = bytes(self._held)
        passed, start = [], 0
        for match in _EVENT_END.finditer(data, looked):
            event = data[start : match.end()]
            start = match.end()
            if self._passes(event):
                passed.append(event)
        self._held = data[start:]
        passed.append(self._overflow())
        return b"".join(passed)

    def finish(self) -> bytes:
        """The stream is over, as it should be; returns what was still held (an event without its end)."""
        if not self._held:
            return b""
        rest, self._held, within_event = bytes(self._held), b"", self._too_long
        passes = self._passes(rest)
        self._too_long = within_event  # `rest` is not an event's end, whether it is passed on or not
        return rest if passes else b""

    def _overflow(self) -> bytes:
        if len(self._held) <= MAX_EVENT_BYTES:
            return b""
        # The last bytes may be the first of an event's end.
        out, self._held = bytes(self._held[: 1 - _LONGEST_END]), self._held[1 - _LONGEST_END :]
        self._too_long = True
        return out

    def _passes(self, event: bytes) -> bool:
        """Learn from one event; False if it is to be taken out."""
        unread = self._too_long or len(event) > MAX_EVENT_BYTES
        self._too_long = False
        if self._closely and (self.failure or b'"error"' in event):
            self.failure = self.failure or failure_of(event)
            if self.failure:
                return False
        if unread:
            return True
        if len(event) <= MAX_PARSED_EVENT and b"[DONE]" in event and data_of(event).strip() == b"[DONE]":
            self.done = True
        if b'"usage"' not in event:
            return True
        answer = object_of(event)
        usage = parse_usage(answer)
        if usage is None:
            return True
        self.usage = usage
        return not (self.strip_usage and answer.get("choices") == [])


def events_of(data: bytes) -> Iterator[bytes]:
    """The events of a stream, each with its end; the last one may lack it. Each is made when it is asked for."""
    start = 0
    for match in _EVENT_END.finditer(data):
        yield data[start : match.end()]
        start = match.end()
    if start < len(data):
        yield data[start:]


def event_at(data: bytes | bytearray, at: int) -> bytes | None:
    """The event that begins there, with its end. None: it has none, or it is longer than what is parsed. O(its length)."""
    end = _EVENT_END.search(data, at, at + MAX_PARSED_EVENT)
    return bytes(data[at : end.end()]) if end else None


def skipped_at(data: bytes | bytearray, at: int) -> int:
    """Where the lines end that begin there and carry no data, as far as they are in the next MAX_PARSED_EVENT bytes."""
    if data.startswith(_DATA, at):
        return at  # nearly all events
    found = _NO_DATA.match(data, at, at + MAX_PARSED_EVENT)
    return found.end() if found else at


def data_of(event: bytes) -> bytes:
    """An event's data lines."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]  # nearly all events
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


class StreamBegin:
    """The beginning of a stream, until its first data: `feed` it all that comes. O(bytes), in pieces of any size.

    silent: all bytes so far carry no data.
    """

    __slots__ = ("_event", "_line", "silent")

    def __init__(self) -> None:
        self.silent = True
        self._line = b""  # what must be known of the unfinished line without data: ":" of any comment
        self._event = bytearray()  # the first event, as far as it has come

    def feed(self, data: bytes) -> bytes | None:
        """The first event if it looks like an error, b"" as long as more bytes have to be awaited, None for any other data."""
        if self.silent:
            data = self._line + data
            at = without_data(data)
            if at == len(data):
                line = data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :]
                self._line = b":" if line.startswith((b":", _RETRY)) else line
                return b""
            self.silent, data = False, data[at:]
        looked = len(self._event)
        self._event += data
        if not _may_be_error(self._event):
            return None
        end = _EVENT_END.search(self._event, max(0, looked - _LONGEST_END + 1))
        return bytes(self._event[: end.end()]) if end else b""


def _may_be_error(data: bytes | bytearray) -> bool:
    """Whether the first event of a stream that begins so may be an engine's error. O(1)."""
    head = data[: 2 * len(_ERROR)].replace(b" ", b"")[: len(_ERROR)]
    return len(data) <= MAX_ERROR_BYTES and _ERROR.startswith(head)


def first_event(data: bytes) -> bytes | None:
    """The first event of a stream that begins so, if it looks like an error: b"" while it is not whole, None if it does not."""
    head = data[: 2 * len(_ERROR)].replace(b" ", b"")[: len(_ERROR)]  # as in `_may_be_error`; a call less for each stream
    if not _ERROR.startswith(head) or len(data) > MAX_ERROR_BYTES:
        return None
    end = _EVENT_END.search(data)
    return data[: end.end()] if end else b""


def failure_of(event: bytes) -> ReplicaFailure | None:
    """What an engine's error event says, if the error is the engine's own and not the client's."""
    error = object_of(event).get("error")
    if not isinstance(error, dict):
        return None
    code = error.get("code")  # the status as a number (vLLM, SGLang), a name (OpenAI), nothing
    own = 500 <= code < 600 if isinstance(code, int) else error.get("type") == "server_error"
    return ReplicaFailure("status", f"it said: {one_line(str(error.get('message')))}") if own else None
