"""Readers that hold the last event of a stream until the answer is stored: with it the client may refer to the answer. Pure."""

from __future__ import annotations

from typing import Final

from gateway.dialects.dialect import OuterReader, StreamReader
from gateway.dialects.events.reader import has_any
from gateway.dialects.events.sse import LONGEST_END, ends_of

LONGEST_EVENT: Final = 4 << 20  # bytes; a longer event passes unread


class HeldReader(OuterReader):
    """Between the reader of a stream and the client. O(bytes), however the stream is divided into chunks.

    marks: one of them is in each event that `taken` looks at. rest: bytes behind the held event, LONGEST_EVENT at most. While
    `holds` is true nothing passes; the caller then sends the held event and `rest` itself. An inner reader may hold, too.
    """

    def __init__(self, inner: StreamReader, marks: tuple[bytes, ...]) -> None:
        super().__init__(inner)
        self.rest = bytearray()
        self._marks = marks
        self._held = bytearray()  # an event that is not complete yet
        self._unread = False  # its beginning has passed, because it is too long
        self._full = False  # the last event is held

    def taken(self, event: bytes) -> bytes | None:
        """The part of a complete event that passes now. None: it is held, with everything behind it."""
        raise NotImplementedError

    def feed(self, chunk: bytes) -> bytes:
        return self.passed_on(self.inner.feed(chunk))

    def finish(self) -> bytes:
        return self.passed_on(self.inner.finish()) + self.flushed()

    def passed_on(self, data: bytes) -> bytes:
        """The part of the inner reader's bytes that passes now."""
        self.note()
        self.holds = self._full or self.inner.holds
        if self._full:
            self.rest += data[: LONGEST_EVENT - len(self.rest)]
            return b""
        if not self._held and not has_any(data, self._marks) and (data.endswith((b"\n\n", b"\r\n\r\n")) or not data):
            return data
        return self._events(data)

    def flushed(self) -> bytes:
        """The part of an event without its end that passes now, at the end of the stream."""
        rest, self._held = bytes(self._held), bytearray()
        return self._passed(rest) if rest else b""

    def release(self) -> bytes:
        """Ends the hold. Returns `rest`."""
        self._full = self.holds = False
        rest, self.rest = bytes(self.rest), bytearray()
        return rest

    def _events(self, data: bytes) -> bytes:
        searched = max(0, len(self._held) - LONGEST_END + 1)
        self._held += data
        out, start = list[bytes](), 0
        for end in ends_of(self._held, searched):
            event = bytes(self._held[start:end])
            start = end
            out.append(self._passed(event))
            if self._full:
                self.rest += self._held[start:]
                start = len(self._held)
                break
        del self._held[:start]
        if len(self._held) > LONGEST_EVENT:
            out.append(bytes(self._held[: 1 - LONGEST_END]))
            del self._held[: 1 - LONGEST_END]
            self._unread = True
        self.within_event = self._unread
        return b"".join(out)

    def _passed(self, event: bytes) -> bytes:
        if self._unread:
            self._unread = False
            return event
        passed = self.taken(event)
        if passed is None:
            self._full = self.holds = True
            return b""
        return passed
