"""Reads a stream for its last event, which the answer's name goes into or before (`log_tap.py`). Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.dialects.dialect import StreamReader
from gateway.features.histories.held import HeldReader

_MARKS: Final = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")  # in last events


class LogReader(HeldReader):
    """Between the reader of a stream and the client.

    is_last: True if an event ends a stream of the dialect. named: the last event for the client. keeps: the last event is held
    until its answer is stored; then the caller sends the result of `ending`.
    """

    def __init__(
        self,
        inner: StreamReader,
        is_last: Callable[[bytes], bool],
        named: Callable[[bytes], bytes],
        *,
        keeps: bool = False,
    ) -> None:
        super().__init__(inner, _MARKS)
        self._is_last = is_last
        self._name = named
        self._keeps = keeps
        self._last = b""
        self._seen = False  # the last event

    def taken(self, event: bytes) -> bytes | None:
        if self._seen or not self._is_last(event):
            return event
        self._seen = True
        if self._keeps:
            self._last = event
            return None
        return self._name(event)

    def ending(self) -> bytes:
        """The held bytes for the client."""
        rest = self.release()
        return self._name(self._last) + rest

    def passed_end(self, end: bytes) -> bytes:
        """The end of the stream, which its inner reader has held, for the client."""
        out = self.passed_on(end) + self.flushed()
        self.holds = False
        return out
