"""Tokens that may not be drawn: tokens that are not allowed, and the last token of a bad word after its other tokens."""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
import torch

NEVER = float("-inf")


class TokenMask:
    """The tokens that one answer may draw. `allowed`: token ids, empty for all. `bad_words`: sequences of tokens that must not
    be completed. `ends`: the tokens that may be drawn where no other is left.
    """

    def __init__(self, allowed: Items[int], bad_words: Iterable[tuple[int, ...]], ends: Items[int]) -> None:
        """O(all tokens)."""
        self._allowed = torch.from_numpy(np.array(allowed, dtype=np.int64)) if len(allowed) else None
        self._ends = torch.tensor(ends, dtype=torch.long)
        last = defaultdict[tuple[int, ...], list[int]](list)  # the last tokens of bad words, by the tokens before them
        for *before, token in bad_words:
            last[tuple(before)].append(token)
        self._last = {before: torch.tensor(tokens) for before, tokens in last.items()}
        self._lengths = sorted({len(before) for before in last})
        self._drawn: list[int] = []  # the last tokens of the answer, as many as the longest bad word has

    @classmethod
    def if_needed(cls, allowed: Items[int], bad_words: Items[tuple[int, ...]], ends: Items[int]) -> "TokenMask | None":
        return cls(allowed, bad_words, ends) if len(allowed) or bad_words else None

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, with -inf for tokens that may not be drawn. O(vocabulary + lengths of bad words)."""
        kept = scores
        if self._allowed is not None:
            kept = torch.full_like(scores, NEVER).scatter(0, self._allowed, scores[self._allowed])
        for length in self._lengths:
            tokens = self._last.get(tuple(self._drawn[len(self._drawn) - length :])) if length <= len(self._drawn) else None
            if tokens is not None:
                kept = kept.index_fill(0, tokens, NEVER)
        if bool(kept.max() > NEVER):
            return kept
        return kept.index_fill(0, self._ends, 0.0) if len(self._ends) else scores  # also before min_tokens

    def advance(self, token: int) -> None:
        """Add a drawn token."""
        longest = self._lengths[-1] if self._lengths else 0
        self._drawn = [*self._drawn, token][-longest:] if longest else []
