"""Stop strings, looked for in a text that comes in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """`feed` pieces of a text; what may be the beginning of a stop string is held back. stopped: one was there.

    Any cutting into pieces gives the same text: what is before the stop string that ends first. O(stops * piece) for each one,
    beside str.find, which looks at what was held back again.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple([_Stop(stop) for stop in stops if stop])
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
        kept = max([stop.feed(piece) for stop in self._stops])
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The text is over: what was held back."""
        rest, self._held = self._held, ""
        return rest

    def __repr__(self) -> str:
        return f"<StopFilter of {len(self._stops)}, {len(self._held)} characters held>"


class _Stop:
    """One stop string, and how much of its beginning the text ends with (Knuth, Morris, Pratt).

    _borders: of each beginning of it, the length of the longest shorter one that it ends with.
    """

    __slots__ = ("_borders", "_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._matched = 0
        self._borders = [0]
        for character in text[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def feed(self, piece: str) -> int:
        """The length of the longest end of the text that it begins with; it is not in the text as a whole. O(piece)."""
        most = len(self.text) - 1
        if len(piece) >= most:
            piece, self._matched = piece[len(piece) - most :], 0
        for character in piece:
            self._matched = self._next(self._matched, character)
        return self._matched

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._borders[matched - 1]
        return matched + 1 if self.text[matched] == character else 0


def _first_end(text: str, stops: Sequence[_Stop]) -> int | None:
    """Where the stop string begins that ends first; of several that end there, the longest. None: there is none."""
    best: tuple[int, int] | None = None
    for stop in stops:
        at = text.find(stop.text)
        if at >= 0 and (best is None or (at + len(stop.text), at) < best):
            best = at + len(stop.text), at
    return None if best is None else best[1]
