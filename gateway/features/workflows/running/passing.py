"""The step whose text is the primary output: the text passes to a client of chat as it comes.

    primary ──► the step that yields it ──► let: "${a.text}" ──► a
                                        └─► switch, once it is decided: value: "${b.text}" ──► b

The text passes once no step can kill its step, nor a step on the way to it that has not ended. Any other primary output comes
in one piece. Pure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from gateway.features.workflows.language.document import LetValue, ModelCall, SwitchArms, WorkflowStep
from gateway.features.workflows.language.results import CHAT, LET, SWITCH, TEXT
from gateway.features.workflows.language.scheduling import DONE
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.step_copies import StepCopy, StepTree

_TEXT_MEMBERS: Final = {CHAT: ("text", "value"), TEXT: ("text",), LET: ("text", "value"), SWITCH: ("value",)}
"""Members of a result that are the text of its step, by kind."""


class PassingText:
    """The way from a primary output to its text. primary: its name; "": nothing passes. steps: whose text may pass, by name."""

    def __init__(self, workflow: Workflow, tree: StepTree, primary: str) -> None:
        self._workflow, self._tree = workflow, tree
        self._begin = self._first(primary) if primary else ""
        self._source: StepCopy | None = None
        self._changes = -1  # of the tree, at the last look
        self.steps = frozenset(self._ends(self._begin, ()))

    def source(self) -> StepCopy | None:
        """The copy whose text passes; None: there is none yet. Once found, it stays. O(1), unless copies were entered, were
        decided or have ended since the last call.
        """
        if self._source is None and self._begin and self._changes != self._tree.changes:
            self._changes = self._tree.changes
            self._source = self._found()
        return self._source

    def _first(self, primary: str) -> str:
        """The step that yields the output as its whole value; "": there is none."""
        if self._workflow.outputs is not None:
            return self._named(self._workflow.outputs.get(primary))
        steps = self._workflow.graph.steps.values()
        sources = [step for step in steps if step.output is not None and step.output.name == primary]
        emitted = any(primary in arm.emit for step in steps if isinstance(step.work, SwitchArms) for arm in step.work.arms)
        if len(sources) != 1 or emitted:
            return ""
        output = sources[0].output
        assert output is not None
        return sources[0].name if output.value is None else self._named(output.value)

    def _named(self, template: ValueTemplate | None) -> str:
        """The step whose text a value is; "": it is something else."""
        expression = template.expression if template is not None else None
        tree = expression.tree if expression is not None else None
        if not (isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name)):
            return ""
        step = self._workflow.graph.steps.get(tree.value.id)
        return step.name if step is not None and tree.attr in _TEXT_MEMBERS.get(step.work.kind, ()) else ""

    def _next(self, step: WorkflowStep) -> Iterator[str]:
        """The steps whose text may be that of a let or a switch."""
        if isinstance(step.work, LetValue):
            name = self._named(step.work.value)
            needs = self._workflow.graph.requires[step.name] | {*step.needs_any}
            if name and step.condition is None and needs == {name}:  # else it may be skipped after a text has passed
                yield name
        elif isinstance(step.work, SwitchArms):
            yield from filter(None, (self._named(arm.value) for arm in step.work.arms))

    def _ends(self, name: str, way: tuple[str, ...]) -> Iterator[str]:
        if not name or name in way:
            return
        step = self._workflow.graph.steps[name]
        if _passes(step):
            yield name
        for each in self._next(step):
            yield from self._ends(each, (*way, name))

    def _found(self) -> StepCopy | None:
        """Follows the way as far as it is decided."""
        name, way = self._begin, set[str]()
        while name and name not in way:
            way.add(name)
            one = self._tree.find(name, ())
            if one is None or one.over != (one.result.status == DONE):  # not entered; or it has ended without a text
                return None
            if not (one.over and len(way) > 1) and self._tree.may_be_killed(one):
                return None
            if _passes(one.step):
                return one
            if isinstance(one.step.work, SwitchArms):
                name = self._named(one.arm.value) if one.decided and one.arm is not None else ""
            else:
                name = next(self._next(one.step), "")
        return None


def _passes(step: WorkflowStep) -> bool:
    return isinstance(step.work, ModelCall) and step.work.constraint is None and step.replacement is None
