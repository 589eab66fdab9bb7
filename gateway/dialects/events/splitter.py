"""Splits a stream of server-sent events into events while its bytes arrive. Pure."""

from __future__ import annotations

from gateway.dialects.events.sse import LONGEST_END, ends_of


class Splitter:
    """O(bytes), however the stream is divided into chunks. The caller bounds the held bytes."""

    __slots__ = ("_held", "_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes. Returns the events completed by them, each with its end."""
        held = self._held
        held += data
        events, start = list[bytes](), 0
        for end in ends_of(held, self._searched):
            events.append(bytes(held[start:end]))
            start = end
        del held[:start]
        self._searched = max(0, len(held) - LONGEST_END + 1)
        return events

    def finish(self) -> bytes:
        """The end of the stream. Returns the rest, an event without its end."""
        rest = bytes(self._held)
        self.drop()
        return rest

    def drop(self) -> None:
        """Forget the incomplete event."""
        self._held = bytearray()
        self._searched = 0

    @property
    def held(self) -> int:
        """Bytes of the incomplete event."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"<Splitter {len(self._held)} bytes held>"
