"""One answer's text, piece by piece, with the scores of its tokens.

Tokens go in, text that may be sent comes out. A token's score comes out with the first character of its text, so the scores
of text that a stop string cut off never do. Scores of tokens without text (half a character, the end token) come with the
text that follows them, at the latest at the end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replica.engine import Detokenizer, TokenScore
from replica.output.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class PlacedScore:
    """A token's score, and the offset in the answer (characters) at which its text begins."""

    offset: int
    score: TokenScore


class Transcript:
    """Call `push` with new tokens as they come, then `finish` once, unless a stop string was `matched`. O(tokens).

    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._detokenizer, self._stops = detokenizer, StopStrings(stops)
        self._searched = bool(stops)
        self._unsearched = min_tokens if stops else 0  # further tokens whose text cannot end the answer
        self.pushed = 0  # tokens, up to the token that completed a stop string
        self._decoded = self._sent = 0  # characters
        self._scores: deque[PlacedScore] = deque()

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def push(self, tokens: list[int], scores: Sequence[TokenScore] = ()) -> tuple[str, list[PlacedScore]]:
        """`scores`: empty, or one per token; an additional score is that of an end token, which has no text."""
        if not scores and not self._searched:
            return self._text(tokens), []
        text = ""
        for at, token in enumerate(tokens):
            if self.matched is not None:
                return text, self._due()
            if scores:
                self._scores.append(PlacedScore(self._decoded, scores[at]))
            text += self._text([token])
        self._scores.extend(PlacedScore(self._decoded, score) for score in scores[len(tokens) :])
        return text, self._due()

    def finish(self) -> tuple[str, list[PlacedScore]]:
        """The held-back text and scores."""
        rest = self._detokenizer.finish()
        self._decoded += len(rest)
        text = self._stops.push(rest)
        if self._stops.matched is None:
            text += self._stops.finish()
            self._sent += len(text)
            due, self._scores = list(self._scores), deque()
            return text, due
        return self._count_sent(text), self._due()

    def _text(self, tokens: list[int]) -> str:
        """The text of these tokens that may be sent. With stop strings, pass one token at a time."""
        if not tokens:
            return ""
        text = self._detokenizer.push(tokens)
        self.pushed += len(tokens)
        self._decoded += len(text)
        if not self._unsearched:
            return self._count_sent(self._stops.push(text))
        self._unsearched -= len(tokens)
        return self._count_sent(text)

    def _count_sent(self, text: str) -> str:
        self._sent += len(text)
        return text

    def _due(self) -> list[PlacedScore]:
        due = []
        while self._scores and self._scores[0].offset < self._sent:
            due.append(self._scores.popleft())
        return due
