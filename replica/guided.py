"""Answers that keep to a grammar: before each token, those that cannot go on with it are taken out of the draw.

llguidance does the work. It never raises for what a grammar does: a matcher that fails stays failed, and from then on
only an end token may be drawn, so that a grammar ends its own answer and never the engine's thread.
"""

import importlib.util
import logging
from functools import lru_cache
from typing import Any

import numpy
import torch

from replica.engine import Grammar

log = logging.getLogger(__name__)
NEVER = float("-inf")
KEPT = 32  # compiled grammars


class Grammars:
    """The grammars of one model. Made once: it reads the whole vocabulary."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        import llguidance
        from llguidance.hf import from_tokenizer

        self._lib, self._ends = llguidance, ends
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        # Compiling takes up to a second and happens when a grammar is looked at; copying what it gave takes none.
        self._compiled = lru_cache(KEPT)(self._compile)

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, ends: list[int]) -> "Grammars | None":
        """None where llguidance is not installed, or can do nothing with this model's vocabulary."""
        if not ends or importlib.util.find_spec("llguidance") is None:
            return None
        try:
            return cls(tokenizer, vocab_size, ends)
        except ValueError as error:
            log.warning("answers of this model cannot be kept to a shape: %s", error)
            return None

    def error(self, grammar: Grammar) -> str | None:
        """Why this grammar cannot be followed, if it cannot."""
        try:
            reason: str = self._compiled(grammar).get_error()
        except ValueError as error:
            return str(error)
        return reason or None

    def guide(self, grammar: Grammar) -> "Guide":
        """For one answer; the grammar has been found without `error`."""
        return Guide(self._compiled(grammar).deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> Any:
        return self._lib.LLMatcher(self._tokenizer, self._lib.grammar_from(grammar.kind, grammar.text), log_level=0)


class Guide:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores without those of tokens that the grammar does not allow next. O(vocabulary)."""
        allowed = numpy.zeros(len(scores), dtype=bool)
        if not self._matcher.is_stopped():
            bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
            allowed = numpy.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool)
        if not allowed.any():
            allowed[self._ends] = True
        return scores.masked_fill(torch.from_numpy(~allowed), NEVER)

    def took(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
