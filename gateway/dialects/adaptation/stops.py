"""Stop strings, looked for in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """`feed` pieces of a text; what may be the beginning of a stop string is held back. stopped: one was there.

    Any cutting into pieces gives the same text: what is before the stop string that ends first. O(piece * stops).
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """What is certain of the text now; nothing after a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        first = _first_end(text, self._stops)
        if first is not None:
            self.stopped, self._held = True, ""
            return text[:first]
        kept = max(map(_overlap, [text] * len(self._stops), self._stops))
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The text is over: what was held back."""
        rest, self._held = self._held, ""
        return rest

    def __repr__(self) -> str:
        return f"<StopFilter of {len(self._stops)}, {len(self._held)} characters held>"


def _first_end(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that ends first; of several that end there, the longest. None: there is none."""
    best: tuple[int, int] | None = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), at) < best):
            best = at + len(stop), at
    return None if best is None else best[1]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that a stop string begins with, and that is not all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
