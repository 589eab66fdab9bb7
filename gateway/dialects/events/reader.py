"""Reads a stream event by event: each event is passed on once it is complete, however the stream is divided into chunks.

So a stream that breaks off within an event ends between two events for the client, where an error event can still follow.
(Engines write whole events; only a break shows the difference.)

Up to the first token each event is parsed: only an event with output shows that the prompt is computed, and the engine's
failure must not reach the client, because another replica can answer. Lines without data pass at once: they keep the client's
connection alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.sse import EVENT_END, LONGEST_END, ends_of, skipped_at
from gateway.errors import ReplicaFailure

# A longer event is passed on unread, so that memory stays bounded. Not Final: a test lowers it.
MAX_EVENT_BYTES = 1 << 20


class EventReader(StreamReader):
    """Dialects implement `passes`: it reads an event, and decides if the client gets it; `instead`, set by it, replaces an
    event that does not pass. Before the first token `begins` gets each event first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.instead = b""
        self._held: bytes | bytearray = b""  # an event that is not complete yet

    def passes(self, event: bytes, *, unread: bool) -> bool:
        """Read one event; False removes it from the stream. unread: it is too long; this may be only its end."""
        raise NotImplementedError

    def begins(self, event: bytes) -> None:
        """Read an event before the first token: sets `started` or `opened`."""
        raise NotImplementedError

    def failure_in(self, event: bytes) -> ReplicaFailure | None:
        """The failure that an engine's error event reports; None for other events, and if the client caused the error. Sets
        `instead` for an error about a full context, to the words of the client's API.
        """
        raise NotImplementedError

    def is_cut(self, rest: bytes) -> bool:
        """True if the stream has ended within this event, which is then dropped. For a long event, `rest` is its end."""
        return False

    def begun(self, head: bytes) -> None:
        """Called with the beginning of an event that is too long to be read. Its end comes to `passes`."""

    def are_whole(self, chunk: bytes) -> bool:
        """True if a chunk consists of whole events, as nearly all chunks do, and nothing is held."""
        if self._held or not chunk.endswith(b"\n\n"):
            return False
        # Else the last line feed may be the first byte of the next event. (A tuple of both ends takes ten times as much.)
        return not chunk.endswith(b"\n\n\n") and not chunk.endswith(b"\r\n\n")

    def read(self, chunk: bytes) -> bytes:
        """`feed` that reads each event."""
        data, searched = chunk, 0
        if self._held:  # O(chunk) until the event is complete, because it may come byte by byte
            # An event's end may straddle the last chunk and this one: search the last bytes again.
            searched = max(0, len(self._held) - LONGEST_END + 1)
            if not isinstance(self._held, bytearray):
                self._held = bytearray(self._held)
            self._held += chunk
            comment = is_line(self._held[0]) and (chunk.find(b"\n") >= 0 or chunk.find(b"\r") >= 0)
            if not (comment or EVENT_END.search(self._held, searched)):
                return self._overflow()
            data = bytes(self._held)
        passed, start = [], 0
        for end in ends_of(data, searched):
            event = data[start:end]
            if is_line(event[0]) and not self.within_event:
                lines = skipped_at(event, 0)
                passed.append(event[:lines])
                event = event[lines:]
            start = end
            if not event or self._passes(event):
                passed.append(event)
            elif self.instead:
                passed.append(self.instead)
                self.instead = b""
        if start < len(data) and is_line(data[start]) and not self.within_event:
            lines = skipped_at(data, start)
            passed.append(data[start:lines])
            start = lines
        self._held = data[start:]
        passed.append(self._overflow())
        return b"".join(passed)

    def finish(self) -> bytes:
        """The last event may lack its blank line, as some engines write it; but it must not be cut."""
        if not self._held or self.is_cut(bytes(self._held)):
            return b""
        rest, self._held, within_event = bytes(self._held), b"", self.within_event
        passes = self._passes(rest)
        self.within_event = within_event  # `rest` is no end of an event, passed on or not
        return rest if passes else self.instead

    def _overflow(self) -> bytes:
        if len(self._held) <= MAX_EVENT_BYTES:
            return b""
        if not self.within_event:
            self.begun(bytes(self._held[:200]))
        # The last bytes may be the beginning of an event's end.
        out, self._held = bytes(self._held[: 1 - LONGEST_END]), self._held[1 - LONGEST_END :]
        self.within_event = True
        return out

    def _passes(self, event: bytes) -> bool:
        unread = self.within_event
        self.within_event = False
        if not unread and len(event) > MAX_EVENT_BYTES:
            self.begun(event[:200])
            unread = True
        if not self.started and not self._begins(event, unread=unread):
            return False
        return self.passes(event, unread=unread)

    def _begins(self, event: bytes, *, unread: bool) -> bool:
        """Read an event before the first token. False: it is the engine's failure, or follows it, or has a replacement."""
        if unread:
            self.started = True
            return True
        if self.failure:
            return False
        self.begins(event)
        if not self.started:
            self.failure = self.failure_in(event)
        return self.failure is None and not self.instead


def is_line(first: int) -> bool:
    """True if bytes that begin with this one are a comment or a blank line."""
    return first in (0x3A, 0x0A, 0x0D)


def has_any_but(names: frozenset[str], members: Mapping[str, Any]) -> bool:
    """True if an object has content in a member beside these."""
    for name, value in members.items():  # noqa: SIM110  (called for each stream: a generator would take ten times as long)
        if value and name not in names:
            return True
    return False


def has(chunk: bytes, mark: bytes) -> bool:
    """True if the mark is in the chunk. (`find` takes a third more time, and `in` creates an exception object first.)"""
    return chunk.partition(mark)[1] != b""


def has_any(chunk: bytes, marks: tuple[bytes, ...]) -> bool:
    """True if one of these marks is in the chunk."""
    for mark in marks:  # noqa: SIM110  (called for each chunk: a generator would take ten times as long)
        if has(chunk, mark):
            return True
    return False
