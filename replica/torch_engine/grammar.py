"""Answers constrained by a grammar: before each token is drawn, the tokens that the grammar does not allow are masked.

llguidance does the work. It does not raise for what a grammar does: a matcher that fails stays failed, and from then on only
an end token may be drawn. So a bad grammar ends its own answer and never the engine's thread.
"""

import importlib.util
import json
import logging
from functools import lru_cache
from typing import Any

import numpy
import torch

from replica.engine import Grammar

log = logging.getLogger(__name__)
NEVER = float("-inf")
CACHED = 32  # compiled grammars


class Grammars:
    """The grammars of one model. The constructor reads the whole vocabulary. `ends` are the model's end tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        import llguidance
        from llguidance.hf import from_tokenizer

        self._lib, self._ends = llguidance, ends
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        # Compiling takes up to a second, and happens in `error`; copying the result takes no time.
        self._compiled = lru_cache(CACHED)(self._compile)

    @classmethod
    def if_available(cls, tokenizer: Any, vocab_size: int, ends: list[int]) -> "Grammars | None":
        """None if llguidance is not installed, or cannot read this model's vocabulary."""
        if not ends or importlib.util.find_spec("llguidance") is None:
            return None
        try:
            return cls(tokenizer, vocab_size, ends)
        except ValueError as error:
            log.warning("answers of this model cannot be constrained by a grammar: %s", error)
            return None

    def error(self, grammar: Grammar) -> str | None:
        """Why this grammar cannot be followed, None if it can."""
        try:
            reason: str = self._compiled(grammar).get_error()
        except ValueError as error:
            return str(error)
        return reason or None

    def start(self, grammar: Grammar) -> "GrammarState":
        """The state of one answer; the grammar has no `error`."""
        return GrammarState(self._compiled(grammar).deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> Any:
        kind, text = ("lark", _calls(grammar.text)) if grammar.kind == "calls" else (grammar.kind, grammar.text)
        return self._lib.LLMatcher(self._tokenizer, self._lib.grammar_from(kind, text), log_level=0)


def _calls(functions: str) -> str:
    """The form of a call that `replica.output.tool_calls` reads."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in json.loads(functions)
    ]
    return 'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json ' + json.dumps({"anyOf": calls})


class GrammarState:
    """The position of one answer in its grammar."""

    def __init__(self, matcher: Any, ends: list[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, with those of tokens that the grammar does not allow next at -inf. O(vocabulary)."""
        allowed = numpy.zeros(len(scores), dtype=bool)
        if not self._matcher.is_stopped():
            bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
            allowed = numpy.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool)
        if not allowed.any():
            allowed[self._ends] = True
        return scores.masked_fill(torch.from_numpy(~allowed), NEVER)

    def advance(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
