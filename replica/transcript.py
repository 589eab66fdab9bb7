"""One answer's text, piece by piece, and the scores of the tokens that it is made of.

Tokens go in, text that may be sent comes out. A token's score comes out with the first of its text, so the scores of what
a stop string cut off never do; those of tokens without text (half a character, the end token) come with what follows
them, at the latest at the end.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replica.engine import TokenScore
from replica.text import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True)
class Placed:
    """A token's score, and where in the answer its text begins."""

    offset: int
    score: TokenScore


class Transcript:
    """`push` each step, then `finish` once, unless a stop string was `matched`. O(tokens).

    In the text of the first `min_tokens` tokens no stop string is looked for.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._detokenizer, self._stops = Detokenizer(decode), StopStrings(stops)
        self._free = min_tokens if stops else 0  # so many tokens more cannot end the answer
        self._decoded = self._sent = 0  # characters
        self._scores: deque[Placed] = deque()

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def push(self, tokens: list[int], scores: Sequence[TokenScore] = ()) -> tuple[str, list[Placed]]:
        """`scores` are empty, or one a token; one more is that of an end token, which has no text."""
        if not scores:
            free, rest = tokens[: self._free], tokens[self._free :]
            return self._text(free) + self._text(rest), []
        text = ""
        for token, score in zip(tokens, scores, strict=False):
            self._scores.append(Placed(self._decoded, score))
            text += self._text([token])
        self._scores.extend(Placed(self._decoded, score) for score in scores[len(tokens) :])
        return text, self._due()

    def finish(self) -> tuple[str, list[Placed]]:
        """What was held back."""
        rest = self._detokenizer.finish()
        self._decoded += len(rest)
        text = self._stops.push(rest)
        if self._stops.matched is None:
            text += self._stops.finish()
            self._sent += len(text)
            due, self._scores = list(self._scores), deque()
            return text, due
        return self._sends(text), self._due()

    def _text(self, tokens: list[int]) -> str:
        """What may be sent of these tokens: all of them before the end of `min_tokens`, or all behind it."""
        if not tokens:
            return ""
        text = self._decode(tokens)
        if not self._free:
            return self._sends(self._stops.push(text))
        self._free -= len(tokens)
        return self._sends(text)

    def _decode(self, tokens: list[int]) -> str:
        text = self._detokenizer.push(tokens)
        self._decoded += len(text)
        return text

    def _sends(self, text: str) -> str:
        self._sent += len(text)
        return text

    def _due(self) -> list[Placed]:
        due = []
        while self._scores and self._scores[0].offset < self._sent:
            due.append(self._scores.popleft())
        return due
