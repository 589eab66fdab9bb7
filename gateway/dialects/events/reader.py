"""Reads a stream event by event: whole events go on as soon as they are whole, whatever the cutting into chunks.

So a stream that breaks off in the middle of an event ends between two events for the client, where an error can still be one.
(Engines write whole events; only a break shows the difference.)
"""

from __future__ import annotations

from gateway.dialects.dialect import StreamReader
from gateway.dialects.events.sse import EVENT_END, LONGEST_END, ONE_TOO_MANY, ends_of

# An event beyond this is passed on unread, so that memory stays bounded. Not Final: a test makes it smaller.
MAX_EVENT_BYTES = 1 << 20


class EventReader(StreamReader):
    """`passes` is for dialects: what they learn from an event, and whether it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._held: bytes | bytearray = b""  # an event that is not whole yet

    def passes(self, event: bytes, *, unread: bool) -> bool:
        """Learn from one event; False if it is to be taken out. unread: it is too long; this may be its end only."""
        raise NotImplementedError

    def is_cut(self, rest: bytes) -> bool:
        """Whether the stream has ended within this event, so that it means nothing. Within a long one: this is its end."""
        return False

    def begun(self, head: bytes) -> None:
        """An event that begins so is too long to be read. Its end comes to `passes`."""

    def are_whole(self, chunk: bytes) -> bool:
        """Whether a chunk has whole events and nothing else, as nearly all chunks do, and nothing is held."""
        return not self._held and chunk.endswith(b"\n\n") and not chunk.endswith(ONE_TOO_MANY)

    def read(self, chunk: bytes) -> bytes:
        """`feed`, with a look at each event."""
        data, searched = chunk, 0
        if self._held:  # O(chunk) until the event is whole, for it may come byte by byte
            # An event's end may straddle the last chunk and this one: search the last bytes again.
            searched = max(0, len(self._held) - LONGEST_END + 1)
            if not isinstance(self._held, bytearray):
                self._held = bytearray(self._held)
            self._held += chunk
            if not EVENT_END.search(self._held, searched):
                return self._overflow()
            data = bytes(self._held)
        passed, start = [], 0
        for end in ends_of(data, searched):
            event = data[start:end]
            start = end
            if self._passes(event):
                passed.append(event)
        self._held = data[start:]
        passed.append(self._overflow())
        return b"".join(passed)

    def finish(self) -> bytes:
        """The last event needs no blank line, for some engines write none; but it must not be cut."""
        if not self._held or self.is_cut(bytes(self._held)):
            return b""
        rest, self._held, within_event = bytes(self._held), b"", self.within_event
        passes = self._passes(rest)
        self.within_event = within_event  # `rest` is not an event's end, whether it is passed on or not
        return rest if passes else b""

    def _overflow(self) -> bytes:
        if len(self._held) <= MAX_EVENT_BYTES:
            return b""
        if not self.within_event:
            self.begun(bytes(self._held[:200]))
        # The last bytes may be the first of an event's end.
        out, self._held = bytes(self._held[: 1 - LONGEST_END]), self._held[1 - LONGEST_END :]
        self.within_event = True
        return out

    def _passes(self, event: bytes) -> bool:
        unread = self.within_event
        self.within_event = False
        if not unread and len(event) > MAX_EVENT_BYTES:
            self.begun(event[:200])
            unread = True
        return self.passes(event, unread=unread)


def has_any(chunk: bytes, marks: tuple[bytes, ...]) -> bool:
    """Whether a chunk has one of these in it. `find`, for `in` makes and drops an exception each time before it searches."""
    for mark in marks:  # noqa: SIM110  (each chunk comes here: a generator would cost ten times as much)
        if chunk.find(mark) >= 0:
            return True
    return False
