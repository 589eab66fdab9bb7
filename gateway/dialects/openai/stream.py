"""The reader of OpenAI's streams: passes events on, notes their usage, and removes the usage event that only the gateway wants.

Engines report the usage of a stream in one event before its end, if asked (`stream_options.include_usage`). The gateway always
asks; unless the client did, too, it removes that event (no choices, but usage). Every other event passes unchanged once it is
complete: so a stream that breaks off within an event ends between two events for the client, where an error event can still
follow. (Engines write whole events; only a break shows the difference.)

If a broken stream is to be resumed, the engine's report of its failure must not reach the client: a watchful reader holds it.

Pure: bytes in, bytes out. Every division of the stream into chunks gives the same bytes and the same state.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.dialect import StreamOpening
from gateway.dialects.events.reader import EventReader
from gateway.dialects.events.sse import (
    EVENT_END,
    LONGEST_END,
    MAX_PARSED_EVENT,
    data_of,
    object_of,
    without_data,
)
from gateway.dialects.excerpt import one_line
from gateway.dialects.openai.usage import parse_usage
from gateway.errors import ReplicaFailure

QUIET: Final = 1  # events of a chat before its first token: the role
MAX_ERROR_BYTES: Final = 64 << 10  # a longer error event is not awaited

_ERROR: Final = b'data:{"error"'  # first event, without its spaces, of an engine that failed before its first token
_DATA: Final = b"data:"
_USUAL: Final = (b'data: {"id"', b'data: {"object"', b'data: {"choices"')  # beginnings of nearly all streams
_RETRY: Final = b"retry:"
_CHOICES: Final = b'"choices"'  # within a text the quotes are escaped


class ChunkReader(EventReader):
    """Reads one stream. strip_usage: remove the usage event. watchful: stop at an event by which the engine reports its
    failure; `failure` is that report. quiet: events before the first token.
    """

    def __init__(self, *, strip_usage: bool, watchful: bool = False, quiet: int = 0) -> None:
        super().__init__()
        self.strip_usage = strip_usage
        self._events = -quiet
        self._counted = 0  # events received when the usage came
        self.failure: ReplicaFailure | None = None
        self._watchful = watchful

    def feed(self, chunk: bytes) -> bytes:
        if self._watchful and (self.failure or chunk.find(b'"error"') >= 0):
            return self.read(chunk)
        # `find`, because `in` creates an exception object before each search.
        if self.are_whole(chunk) and chunk.find(b'"usage"') < 0 and chunk.find(b"[DONE]") < 0:
            self.within_event = False
            self._events += chunk.count(_CHOICES)
            return chunk  # whole events without usage or end: nearly all chunks of nearly all streams
        return self.read(chunk)

    @property
    def passed(self) -> int:
        """One token for each event with choices, as engines write them; the first event of a chat has only the role."""
        return max(0, self._events)

    @property
    def late(self) -> bool:
        return self.usage is not None and self._events - self._counted > 1

    def raise_failure(self) -> None:
        if failure := self.failure:
            # A new object: a raised exception refers to the frames that it passed, and they to this reader.
            raise ReplicaFailure(failure.reason, failure.message, reached=failure.reached)

    def passes(self, event: bytes, *, unread: bool) -> bool:
        if self._watchful and (self.failure or event.find(b'"error"') >= 0):
            self.failure = self.failure or failure_of(event)
            if self.failure:
                return False
        if unread:
            return True
        self._events += event.find(_CHOICES) >= 0
        if len(event) <= MAX_PARSED_EVENT and event.find(b"[DONE]") >= 0 and data_of(event).strip() == b"[DONE]":
            self.done = True
        if event.find(b'"usage"') < 0:
            return True
        answer = object_of(event)
        usage = parse_usage(answer)
        if usage is None:
            return True
        no_text = answer.get("choices") == []
        self._events -= no_text
        self.usage, self._counted = usage, self._events
        return not (self.strip_usage and no_text)


class ChatOpening(StreamOpening):
    """Reads the beginning of a stream up to its first data, or to the end of its first event if that may be an error.
    O(bytes).
    """

    def __init__(self) -> None:
        super().__init__()
        self._line = b""  # beginning of the unfinished line without data; ":" for any comment
        self._event = bytearray()  # received part of the first event

    def feed(self, data: bytes) -> bool:
        if self.silent:
            data = self._line + data
            at = without_data(data)
            if at == len(data):
                line = data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :]
                self._line = b":" if line.startswith((b":", _RETRY)) else line
                return False
            self.silent, data = False, data[at:]
        searched = len(self._event)
        self._event += data
        if not _may_be_error(self._event):
            return True
        end = EVENT_END.search(self._event, max(0, searched - LONGEST_END + 1))
        if end is None:
            return False
        if failure := failure_of(bytes(self._event[: end.end()])):
            raise failure
        return True


def _may_be_error(data: bytes | bytearray) -> bool:
    """True if the first event of a stream with this beginning may be an engine's error. O(1)."""
    head = data[: 2 * len(_ERROR)].replace(b" ", b"")[: len(_ERROR)]
    return len(data) <= MAX_ERROR_BYTES and _ERROR.startswith(head)


def begins_well(data: bytes) -> bool:
    """True if a stream begins with data that is no error, as nearly all streams do. O(1)."""
    return data.startswith(_USUAL) or (data.startswith(_DATA) and not _may_be_error(data))


def failure_of(event: bytes) -> ReplicaFailure | None:
    """The failure that an engine's error event reports; None if the client caused the error."""
    error = object_of(event).get("error")
    if not isinstance(error, dict):
        return None
    code = error.get("code")  # the status as a number (vLLM, SGLang), a name (OpenAI), nothing
    own = 500 <= code < 600 if isinstance(code, int) else error.get("type") == "server_error"
    return ReplicaFailure("status", f"its error: {one_line(str(error.get('message')))}") if own else None
