"""Stop strings: the end of an answer's text, independent of the pieces in which the text arrives."""


class StopStrings:
    """Cuts streamed text at the first stop string that is complete; the stop string is not part of the answer.

    If two are complete at the same character, the longer one counts. So the cut does not depend on how the text is split.
    Text that could still become a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """O(characters of the stop strings)."""
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns the text that can no longer be part of a stop string. O(held + text per stop string)."""
        if self.matched is not None or not self._searches:
            return "" if self.matched is not None else text
        known, text = len(self._held), self._held + text
        for end in range(known, len(text)):
            complete = [search.stop for search in self._searches if search.read(text[end])]
            if complete:
                self._held, self.matched = "", max(complete, key=len)
                return text[: end + 1 - len(self.matched)]
        keep = max(search.begun for search in self._searches)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held-back text, which has not become a stop string."""
        text, self._held = self._held, ""
        return text


class _Search:
    """An incremental search for one stop string (Knuth, Morris and Pratt): `begun` is the number of its characters that the
    text ends with. Each character is read once.
    """

    def __init__(self, stop: str) -> None:
        self.stop, self.begun = stop, 0
        self._shorter = [0]  # for each prefix: the length of its longest proper suffix that is also a prefix
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def read(self, character: str) -> bool:
        """Add a character; returns whether it completes the stop string. Amortised O(1)."""
        self.begun = self._next(self.begun, character)
        return self.begun == len(self.stop)

    def _next(self, begun: int, character: str) -> int:
        while begun and self.stop[begun] != character:
            begun = self._shorter[begun - 1]
        return begun + (self.stop[begun] == character)
