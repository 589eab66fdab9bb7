"""The tokens of a run before it begins, estimated from the bytes of its inputs and the most tokens that each step may generate.

A text has a token for so many bytes as the prompts of its model have on average; the caller knows them.

Every possible step counts, with all copies. A value that a connector gives has no estimate, nor has a prompt with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.features.workflows.language.document import ConnectorCall, EachItem, LetValue, ModelCall, SwitchArms
from gateway.features.workflows.language.expressions import INPUTS, Expression
from gateway.features.workflows.language.operations import WorkBudget
from gateway.features.workflows.language.prefixes import PrefixUnion, PromptOutlines, PromptPiece
from gateway.features.workflows.language.templates import TextTemplate
from gateway.features.workflows.language.values import MAX_MESSAGES_BYTES, EvaluationError, ValueTooLargeError, text_of
from gateway.features.workflows.language.workflow import Workflow

BYTES_PER_TOKEN: Final = 4.0
MESSAGE_TOKENS: Final = 4  # of its role and its ends
PIECE_WORK: Final = 2000  # units of a piece of a prompt (`WorkBudget`)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The calls of one step. copies: their number at most. pieces: tokens of the pieces of a prompt (`PromptOutlines`).
    answer: tokens at most.
    """

    model: str
    copies: int
    pieces: Sequence[int]
    answer: int

    @property
    def prompt(self) -> int:
        """Tokens of each prompt."""
        return sum(self.pieces)


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """steps: by name. prompt_tokens: of all prompts. least_tokens: of these, if every shared prefix is computed once."""

    steps: Mapping[str, StepEstimate]
    prompt_tokens: int
    least_tokens: int


def estimate_of(
    workflow: Workflow,
    copies: Mapping[str, int],
    inputs: Mapping[str, Any],
    max_tokens: int,
    bytes_per_token: Callable[[str], float] = lambda model: BYTES_PER_TOKEN,
) -> RunEstimate | None:
    """None: a prompt has a part of unknown size, or the inputs are too large, or their expressions too much work. copies: of
    each step at most. inputs: the given ones. bytes_per_token: of a model's prompts.
    """
    try:
        return _Estimation(workflow, copies, inputs, max_tokens, bytes_per_token).estimate()
    except _UnknownSizeError:
        return None


class _UnknownSizeError(Exception):
    """A connector gives it, or it is too much work."""


class _Estimation:
    def __init__(
        self,
        workflow: Workflow,
        copies: Mapping[str, int],
        inputs: Mapping[str, Any],
        max_tokens: int,
        bytes_per_token: Callable[[str], float],
    ) -> None:
        self._graph = workflow.graph
        self._copies, self._inputs, self._max_tokens = copies, inputs, max_tokens
        self._outlines = PromptOutlines(workflow.graph)
        self._variables = {
            step.work.variable: step.work for step in self._graph.steps.values() if isinstance(step.work, EachItem)
        }
        self._budget = WorkBudget()
        self._bytes_per_token, self._scale = bytes_per_token, BYTES_PER_TOKEN
        self._answers: dict[tuple[float, str], int] = {}  # by scale and step
        self._found: dict[tuple[float, str], int] = {}  # of expressions of inputs, and of names, by scale and text

    def estimate(self) -> RunEstimate:
        """Raises _UnknownSizeError."""
        try:
            self._budget.charge(self._inputs)
            return self._estimated()
        except EvaluationError:
            raise _UnknownSizeError from None

    def _estimated(self) -> RunEstimate:
        """Raises _UnknownSizeError, or EvaluationError for too much work. O(pieces of the prompts of all steps)."""
        union, steps = PrefixUnion(), {}
        for name, step in self._graph.steps.items():
            if not isinstance(step.work, ModelCall):
                continue
            self._scale = self._bytes_per_token(step.work.model)
            counted = min(self._copies[name], 2)
            self._budget.spend(PIECE_WORK * counted * len(self._outlines.of(name)))
            sizes = [self._piece(piece.template, piece.source) for piece in self._outlines.of(name)]
            own = self._outlines.own_names(name)
            for copy in range(counted):
                pieces = [
                    PromptPiece((piece.words, copy if piece.names & own else 0), size)
                    for piece, size in zip(self._outlines.of(name), sizes, strict=True)
                ]
                answer = PromptPiece((f"answer of {name}", copy if name in own else 0), self._answer(name))
                new = union.add(step.work.model, pieces, [answer])
            if self._copies[name] > 2:  # all copies after the first one compute as many
                union.least_tokens += new * (self._copies[name] - 2)
            steps[name] = StepEstimate(step.work.model, self._copies[name], sizes, self._answer(name))
        total = sum(each.copies * each.prompt for each in steps.values())
        return RunEstimate(steps, total, union.least_tokens)

    def _piece(self, template: Any, source: str) -> int:
        return self._answer(source) if source else MESSAGE_TOKENS + self._size(template.value)

    def _size(self, value: Any) -> int:
        """Tokens of a value with templates."""
        if isinstance(value, TextTemplate):
            return sum(self._tokens(each) if isinstance(each, str) else self._expression(each) for each in value.pieces)
        if isinstance(value, dict | list):
            return sum(map(self._size, value.values() if isinstance(value, dict) else value))
        return self._tokens(text_of(value))

    def _expression(self, expression: Expression) -> int:
        roots = {each.root for each in expression.references}
        if not roots <= {INPUTS}:
            return sum(map(self._named, roots))
        key = self._scale, expression.text
        if key not in self._found:
            self._found[key] = self._evaluated(expression)
        return self._found[key]

    def _evaluated(self, expression: Expression) -> int:
        try:
            value = expression.evaluate({INPUTS: self._inputs}, self._budget, MAX_MESSAGES_BYTES)
        except ValueTooLargeError:
            raise _UnknownSizeError from None
        except EvaluationError:  # an input is missing
            return 0
        return sum(map(self._tokens, _texts(value)))

    def _named(self, name: str) -> int:
        key = self._scale, name
        if key not in self._found:
            if name == INPUTS:
                self._found[key] = sum(map(self._tokens, _texts(self._inputs)))
            elif name in self._variables:
                self._found[key] = self._size(self._variables[name].items.value)
            else:
                return self._answer(name)
        return self._found[key]

    def _answer(self, name: str) -> int:
        """Tokens of the result of a step."""
        key = self._scale, name
        if key not in self._answers:
            work = self._graph.steps[name].work
            if isinstance(work, ModelCall):
                found = work.max_tokens or self._max_tokens
            elif isinstance(work, LetValue):
                found = self._size(work.value.value)
            elif isinstance(work, EachItem):
                found = work.bound * self._size(work.value.value)
            elif isinstance(work, SwitchArms):
                found = max((self._size(arm.value.value) for arm in work.arms if arm.value), default=0)
            else:
                assert isinstance(work, ConnectorCall)
                raise _UnknownSizeError
            self._answers[key] = found
        return self._answers[key]

    def _tokens(self, text: str) -> int:
        """Tokens of a text for the model of this step, rounded up."""
        return math.ceil(len(text.encode("utf-8", "surrogatepass")) / self._scale)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value: a message's content is its size, not its JSON."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
    elif value is not None:
        yield text_of(value)
