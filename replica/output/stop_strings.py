"""Stop strings: where an answer's text is cut, however the text arrives."""


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
        """Add text; returns what can no longer be part of a stop string. O(held + text per stop string)."""
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
    """How much of a stop string a text ends in (`begun` characters), as Knuth, Morris and Pratt have it: no character is looked
    at again, whatever the stop string is."""

    def __init__(self, stop: str) -> None:
        self.stop, self.begun = stop, 0
        self._shorter = [0]  # of the first n + 1 characters: how many of the last ones are the first ones, too
        for character in stop[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def read(self, character: str) -> bool:
        """Whether the stop string is complete with it. Amortised O(1)."""
        self.begun = self._next(self.begun, character)
        return self.begun == len(self.stop)

    def _next(self, begun: int, character: str) -> int:
        while begun and self.stop[begun] != character:
            begun = self._shorter[begun - 1]
        return begun + (self.stop[begun] == character)
