"""From tokens to text that may be sent: whole characters only, and nothing beyond a stop string.

A token of a byte-level vocabulary can end in the middle of a character, and what a token decodes to depends on the
tokens before it. So `Detokenizer` decodes a short window of tokens twice, without and with the new ones, and sends
the difference once it ends in a whole character. `StopStrings` holds back the longest end of the text that could
still become a stop string.
"""

from collections.abc import Callable, Iterable

UNFINISHED = "\ufffd"


class Detokenizer:
    """Incremental decoding of one answer. `push` is O(window), not O(answer)."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # leading tokens of the window whose text has been given out

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens in, give out the text that is whole by now."""
        self._window.extend(tokens)
        text = self._fresh()
        if text.endswith(UNFINISHED):
            return ""
        # The tokens just sent stay as the left context of the next ones.
        self._window = self._window[self._sent :]
        self._sent = len(self._window)
        return text

    def finish(self) -> str:
        """The rest, even when it ends in half a character."""
        text, self._window, self._sent = self._fresh(), [], 0
        return text

    def _fresh(self) -> str:
        before = self._decode(self._window[: self._sent])
        return self._decode(self._window)[len(before) :]


class StopStrings:
    """Cuts a stream of text at the first of some stop strings that is complete, which is not part of the answer.

    Of two that are complete with the same character the longer one counts. So the cut does not depend on how the text came.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text in, give out what cannot be part of a stop string any more. O(held + text) per stop string."""
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
        """What was held back in vain."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
