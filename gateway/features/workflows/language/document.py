"""Inputs and steps as values, as a document states them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.features.workflows.language.constraints import AnswerConstraint
from gateway.features.workflows.language.operations import Scope, WorkBudget
from gateway.features.workflows.language.results import CALL, EACH, LET, SWITCH, TEXT
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.values import EvaluationError, type_name

Block = Mapping[str, "WorkflowStep"]
"""Steps by name that see each other."""


@dataclass(frozen=True, slots=True)
class InputDeclaration:
    """One input. type: messages, string, number, integer, boolean, list or object. choices: its `enum`."""

    type: str
    required: bool = False
    default: Any = None
    choices: tuple[Any, ...] = ()
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A `chat` or a `text` step. kind: chat or text.

    source: the step whose transcript it continues. opening: messages (chat) or the prompt (text), if there is no source.
    append: messages, or a text. model, max_tokens, sampling: its own, its source's (model only), or the defaults'; max_tokens:
    None: the gateway's. tools, tool_choice: passed on. extra: merged into the body.
    """

    kind: str
    model: str
    source: str | None = None
    opening: ValueTemplate | None = None
    append: ValueTemplate | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, ValueTemplate] = field(default_factory=dict)
    constraint: AnswerConstraint | None = None
    tools: ValueTemplate | None = None
    tool_choice: ValueTemplate | None = None
    extra: ValueTemplate | None = None

    def value_of(self, answer: str, budget: WorkBudget | None = None) -> Any:
        """The `.value` of an answer. Raises ConstraintUnsatisfiedError, or EvaluationError for a value that is too large."""
        if self.constraint is not None:
            return self.constraint.read(answer, (budget or WorkBudget()).spend)
        return answer.strip() if self.kind == TEXT else answer

    @property
    def templates(self) -> Iterator[ValueTemplate]:
        single = (self.opening, self.append, self.tools, self.tool_choice, self.extra)
        yield from (each for each in (*single, *self.sampling.values()) if each is not None)


@dataclass(frozen=True, slots=True)
class ConnectorCall:
    """use: name of a connector. arguments: its body."""

    use: str
    arguments: ValueTemplate
    kind: str = CALL

    @property
    def templates(self) -> Iterator[ValueTemplate]:
        yield self.arguments


@dataclass(frozen=True, slots=True)
class LetValue:
    """A value that is computed here."""

    value: ValueTemplate
    kind: str = LET

    @property
    def templates(self) -> Iterator[ValueTemplate]:
        yield self.value


@dataclass(frozen=True, slots=True)
class SwitchArm:
    """when: None: always. emit: outputs. kills: steps, at once. value: of the switch, known when the steps have ended."""

    when: ValueTemplate | None
    emit: Mapping[str, ValueTemplate]
    kills: tuple[str, ...]
    steps: Block
    value: ValueTemplate | None


@dataclass(frozen=True, slots=True)
class SwitchArms:
    """The first arm whose condition is true is taken; none: the value is null."""

    arms: tuple[SwitchArm, ...]
    kind: str = SWITCH

    @property
    def templates(self) -> Iterator[ValueTemplate]:
        for arm in self.arms:
            yield from ((arm.when,) if arm.when else ())
            yield from arm.emit.values()


@dataclass(frozen=True, slots=True)
class EachItem:
    """items: a list. variable: the name of an item in `steps` and `value`. bound: the list's greatest length."""

    items: ValueTemplate
    variable: str
    steps: Block
    value: ValueTemplate
    bound: int = 0
    kind: str = EACH

    def items_for(self, scope: Scope, budget: WorkBudget | None = None) -> list[Any]:
        """The items of a run. Raises EvaluationError if there is no list, or more than `bound`."""
        found = self.items.fill(scope, budget)
        if not isinstance(found, list) or len(found) > self.bound:
            what = f"{len(found)} items" if isinstance(found, list) else type_name(found)
            raise EvaluationError(f"{self.items.path}: a list of at most {self.bound} items is expected, got {what}")
        return found

    @property
    def templates(self) -> Iterator[ValueTemplate]:
        yield self.items


Work = ModelCall | ConnectorCall | LetValue | SwitchArms | EachItem


@dataclass(frozen=True, slots=True)
class OutputRule:
    """`yield` of a step. value: None: the value of the step. stream: delta, snapshot, or "": only the whole value."""

    name: str
    value: ValueTemplate | None = None
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Replacement:
    """`on_error: {value: X}`: the value of a step that has failed."""

    value: ValueTemplate


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """One step. condition: `if`. kills: steps, once it is done. retries: None: the default of its kind.

    skips_on_error, replacement: `on_error`; neither: the run fails.
    """

    name: str
    path: str
    work: Work
    needs: tuple[str, ...] = ()
    needs_any: tuple[str, ...] = ()
    condition: ValueTemplate | None = None
    output: OutputRule | None = None
    kills: tuple[str, ...] = ()
    timeout_s: float | None = None
    retries: int | None = None
    skips_on_error: bool = False
    replacement: Replacement | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks within it."""
        if isinstance(self.work, SwitchArms):
            return tuple(arm.steps for arm in self.work.arms)
        return (self.work.steps,) if isinstance(self.work, EachItem) else ()

    @property
    def output_names(self) -> Iterator[str]:
        """The outputs that it yields, itself or by an arm."""
        if self.output is not None:
            yield self.output.name
        if isinstance(self.work, SwitchArms):
            for arm in self.work.arms:
                yield from arm.emit

    @property
    def late(self) -> Iterator[tuple[ValueTemplate, Block]]:
        """Values that are known once the steps of a block have ended, with that block."""
        if isinstance(self.work, SwitchArms):
            yield from ((arm.value, arm.steps) for arm in self.work.arms if arm.value)
        elif isinstance(self.work, EachItem):
            yield self.work.value, self.work.steps

    @property
    def early(self) -> Iterator[ValueTemplate]:
        """Values that are needed before it can start; `yield.value` may also refer to the step itself."""
        yield from self.work.templates
        value = self.output.value if self.output else None
        replaced = self.replacement.value if self.replacement else None
        yield from (each for each in (self.condition, value, replaced) if each is not None)
