"""Stop strings: where an answer's text is cut, however the text arrives."""


class StopStrings:
    """Cuts streamed text at the first stop string that is complete; the stop string is not part of the answer.

    If two are complete at the same character, the longer one counts. So the cut does not depend on how the text is split.
    Text that could still become a stop string is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what can no longer be part of a stop string. O(held + text) per stop string."""
        if self.matched is not None or not self._stops:
            return "" if self.matched is not None else text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, cut, self.matched = min(found)
            self._held = ""
            return text[:cut]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The held-back text, which has not become a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
