"""Answers constrained by a grammar: before each token is drawn, the tokens that the grammar does not allow are masked.

llguidance does the work. It does not raise for a grammar's failure (a grammar with too many alternatives at once, say, has
no bitmask): a matcher that fails stays failed. So its state is checked: before the answer begins, where a failure is a 400, and
at each token, where it ends its own answer with an error, because the text so far would be no valid answer.

It parses a grammar by recursive functions, as deep as rules (or a schema's references) refer to each other: a thousand
levels end a process with the usual stack. So grammars are compiled in threads with a stack that is large enough for any grammar
whose length `replica.api.prepare` allows. Using the compiled grammar needs no more than a usual stack.
"""

import importlib.util
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import numpy
import torch

from replica.engine import Grammar

log = logging.getLogger(__name__)
NEVER = float("-inf")
CACHED: Final = 32  # compiled grammars
CACHED_TEXT: Final = 1 << 17  # characters of these grammars
STACK: Final = 256 << 20  # bytes; memory is only used for the part that is reached
MAX_REASON = 300  # characters
EXACT: Final = 1 << 53  # up to here, floats represent whole numbers exactly
SPECIAL: Final = 0xFF  # the first byte of a special token in llguidance
_BOUNDS: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_LARGE: Final = re.compile(r"\d{16}|\d\s*[eE]\s*[+-]?\d")


class GrammarFailed(Exception):
    """An answer cannot be continued under its grammar; the message is for the client."""


class Grammars:
    """The grammars of one model. The constructor reads the whole vocabulary. `ends` are the model's end tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, ends: list[int]) -> None:
        import llguidance
        from llguidance.hf import from_tokenizer

        self._lib, self._ends = llguidance, ends
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        # Compiling takes seconds for the longest ones, and happens in `error`; copying the result takes no time.
        self._compiled = _CompiledGrammar(self.compile)

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
        """The reason why this grammar cannot be followed, None if it can."""
        if (inexact := _inexact(grammar)) is not None:
            return inexact
        try:
            grammar.compiled = matcher = self._compiled.get(grammar)
            reason: str = matcher.get_error()
            if not reason:
                first = matcher.deep_copy()
                first.compute_bitmask()
                reason = first.get_error() if first.is_error() else ""
        except (ValueError, RecursionError) as error:
            reason = str(error)
        return _cut(reason) or None

    def start(self, grammar: Grammar) -> "GrammarState":
        """The state of one answer. The caller has checked that the grammar has no `error`."""
        return GrammarState((grammar.compiled or self._compiled.get(grammar)).deep_copy(), self._ends, self._tokenizer)

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar. Called in a thread with a large stack."""
        kinds = {"calls": "lark", "lark": "grammar"}  # "grammar": Lark or GBNF
        text = _calls(grammar.text) if grammar.kind == "calls" else grammar.text
        return self._lib.LLMatcher(
            self._tokenizer, self._lib.grammar_from(kinds.get(grammar.kind, grammar.kind), text), log_level=0
        )


class _CompiledGrammar:
    """A cache of the compiled grammars that were used last. Safe for several threads."""

    def __init__(self, compiled: Callable[[Grammar], Any]) -> None:
        """`compiled` compiles a grammar and is called in a thread with a large stack."""
        self._compile, self._lock, self._starting = compiled, threading.Lock(), threading.Lock()
        self._known = OrderedDict[Grammar, Any]()
        self._characters = 0

    def get(self, grammar: Grammar) -> Any:
        """A compiled grammar. O(1) if it is cached; else it is compiled. Raises the errors of `compiled`."""
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return self._known[grammar]
        made = self._on_large_stack(grammar)
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = made
                self._characters += len(grammar.text)
            while len(self._known) > CACHED or (self._characters > CACHED_TEXT and len(self._known) > 1):
                self._characters -= len(self._known.popitem(last=False)[0].text)
        return made

    def _on_large_stack(self, grammar: Grammar) -> Any:
        result = Future[Any]()

        def run() -> None:
            try:
                result.set_result(self._compile(grammar))
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                result.set_exception(error)

        thread = threading.Thread(target=run, name="grammar", daemon=True)
        with self._starting:  # the stack size applies to all threads that start now
            usual = threading.stack_size(STACK)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)
        return result.result()


def _inexact(grammar: Grammar) -> str | None:
    """The reason if a grammar has bounds of numbers that llguidance (1.9) does not represent exactly: answers would have other
    numbers, and two integer bounds below -2^63 end the process. None if it has none.
    """
    if grammar.kind in ("json", "calls"):
        key = next(_large_bounds(json.loads(grammar.text)), None)
        return key and f"a {key} of more than 2^53 cannot be followed exactly."
    if grammar.kind == "lark" and "%json" in grammar.text and _LARGE.search(grammar.text):
        return "numbers in a grammar with %json may have 15 digits at most, and no exponent."
    return None


def _large_bounds(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key in _BOUNDS & schema.keys():
            if isinstance(schema[key], int | float) and not abs(schema[key]) <= EXACT:
                yield key
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _large_bounds(inner)


def _cut(reason: str) -> str:
    """llguidance's reason without the state of its parser, and without the rest of a long grammar."""
    first, *rest = reason.splitlines() or [""]
    if first.endswith(":") and rest:  # the error of a regular expression comes last
        first = f"{first} {rest[-1].strip()}"
    return first[:MAX_REASON]


def _calls(functions: str) -> str:
    """A grammar for calls in the form that `replica.output.tool_calls` reads."""
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

    def __init__(self, matcher: Any, ends: list[int], tokenizer: Any) -> None:
        self._matcher, self._ends, self._tokenizer = matcher, ends, tokenizer

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, with -inf for tokens that the grammar does not allow next. Raises GrammarFailed. O(vocabulary)."""
        allowed = numpy.zeros(len(scores), dtype=bool)
        if not self._matcher.is_stopped():
            bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
            self._check()
            allowed = numpy.unpackbits(bits, bitorder="little")[: len(scores)].astype(bool)
            if (spelled := self._spelled(allowed)) is not None:
                allowed[:] = False
                allowed[spelled] = True
        if not allowed.any():
            allowed[self._ends] = True
        return scores.masked_fill(torch.from_numpy(~allowed), NEVER)

    def _spelled(self, allowed: "numpy.typing.NDArray[numpy.bool_]") -> int | None:
        """The ordinary token to draw where the grammar requires a text that is spelled like a special token: llguidance (1.9)
        then allows only the special token, and does not accept it afterwards. None in all other cases.
        """
        (only,) = numpy.flatnonzero(allowed) if numpy.count_nonzero(allowed) == 1 else [-1]
        if only < 0 or not self._tokenizer.is_special_token(int(only)):
            return None
        forced: bytes = self._matcher.compute_ff_bytes()
        if not forced or forced[0] == SPECIAL:  # the grammar requires no text, or the special token itself
            return None
        begins = self._tokenizer.greedy_tokenize(forced.decode("utf-8", "ignore"))
        return int(begins[0]) if begins else None

    def advance(self, token: int) -> None:
        """Add a drawn token. Raises GrammarFailed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(f"the answer cannot follow this format any further: {_cut(self._matcher.get_error())}")
