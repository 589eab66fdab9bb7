"""A stream of server-sent events cut into events, as its bytes come. Pure."""

from __future__ import annotations

from gateway.dialects.events.sse import LONGEST_END, ends_of


class Splitter:
    """`feed` it. O(bytes), whatever the cutting into chunks. Who uses it bounds what it holds."""

    __slots__ = ("_held", "_searched")

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with its end."""
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
        """The stream is over: what is left of it, which lacks an event's end."""
        rest = bytes(self._held)
        self.drop()
        return rest

    def drop(self) -> None:
        """What is not whole never will be."""
        self._held = bytearray()
        self._searched = 0

    @property
    def held(self) -> int:
        """Bytes of an event that is not whole."""
        return len(self._held)

    def __repr__(self) -> str:
        return f"<Splitter {len(self._held)} bytes held>"
