"""Finds stop strings in a text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Returns the text up to the first stop string, and holds back a possible beginning of one. stopped: a stop string was
    found.

    Any division into pieces gives the same text: everything before the stop string that ends first. O(stops * piece) per piece,
    plus str.find over the held text.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple([_Stop(stop) for stop in stops if stop])
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that is certain now; nothing after a stop string."""
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
        """The held text, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def __repr__(self) -> str:
        return f"<StopFilter of {len(self._stops)}, {len(self._held)} characters held>"


class _Stop:
    """One stop string, and the length of its beginning that the text ends with (Knuth, Morris, Pratt).

    _borders: for each prefix, the length of its longest proper prefix that is also a suffix.
    """

    __slots__ = ("_borders", "_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._matched = 0
        self._borders = [0]
        for character in text[1:]:
            self._borders.append(self._next(self._borders[-1], character))

    def feed(self, piece: str) -> int:
        """The length of the longest prefix of the stop string that the text ends with; the text does not contain all of it.
        O(piece).
        """
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
    """The beginning of the stop string that ends first; of several with that end, the longest. None: there is none."""
    best: tuple[int, int] | None = None
    for stop in stops:
        at = text.find(stop.text)
        if at >= 0 and (best is None or (at + len(stop.text), at) < best):
            best = at + len(stop.text), at
    return None if best is None else best[1]
