"""Reads a stream for its last event, which the answer's name goes into or before (`log_tap.py`). Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.dialects.dialect import OuterReader, StreamReader
from gateway.dialects.events.reader import has_any
from gateway.dialects.events.splitter import Splitter
from gateway.dialects.finished_answer import MAX_ANSWER

_MARKS: Final = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")  # in last events


class LogReader(OuterReader):
    """Between the reader of a stream and the client. Complete events are not held. O(bytes).

    is_last: True if an event ends a stream of the dialect. named: the last event for the client.
    """

    def __init__(self, inner: StreamReader, is_last: Callable[[bytes], bool], named: Callable[[bytes], bytes]) -> None:
        super().__init__(inner)
        self._is_last = is_last
        self._name = named
        self._splitter = Splitter()
        self._passes = False  # the rest passes unread

    def feed(self, chunk: bytes) -> bytes:
        return self._read(self.inner.feed(chunk))

    def finish(self) -> bytes:
        out = self._read(self.inner.finish())
        rest = self._splitter.finish()
        return out + (self._named(rest) if rest else b"")

    def passed_end(self, end: bytes) -> bytes:
        """The end of the stream, which its inner reader has held, for the client."""
        out = self._read(end) + self._splitter.finish()
        self.holds = False
        return out

    def _read(self, data: bytes) -> bytes:
        self.note()
        self.holds = self.inner.holds
        if self._passes:
            self.within_event = self.inner.within_event
            return data
        if not self._splitter.held and not has_any(data, _MARKS) and (data.endswith((b"\n\n", b"\r\n\r\n")) or not data):
            return data
        out = [self._named(event) for event in self._splitter.feed(data)]
        if self._splitter.held > MAX_ANSWER:
            out.append(self._splitter.finish())
            self._passes, self.within_event = True, True
        return b"".join(out)

    def _named(self, event: bytes) -> bytes:
        """The event, with the answer's name if it is the last one."""
        if self._passes or not self._is_last(event):
            return event
        self._passes = True
        return self._name(event)
