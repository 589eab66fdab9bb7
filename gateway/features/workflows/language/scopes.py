"""Names in a workflow: each refers to something that is seen there, and no step waits for itself.

A name is seen in its own block and in the blocks within it. Values that are late (of an arm, of an item) also see their block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gateway.features.workflows.language.document import (
    Block,
    EachItem,
    InputDeclaration,
    ModelCall,
    OutputRule,
    SwitchArms,
    WorkflowStep,
)
from gateway.features.workflows.language.expressions import INPUTS
from gateway.features.workflows.language.faults import DocumentFaults, suggestion
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.operations import Reference
from gateway.features.workflows.language.results import MEMBERS
from gateway.features.workflows.language.templates import ValueTemplate

_CONSTANTS: Final[Mapping[str, str]] = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True)
class _VisibleNames:
    """Names at one place. around: the steps around it. own: the step itself; "": none, or it may refer to itself."""

    steps: frozenset[str]
    variables: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()
    own: str = ""

    def within(self, block: Block, variable: str = "") -> _VisibleNames:
        return replace(self, steps=self.steps | block.keys(), variables=self.variables | ({variable} - {""}))


def check_scopes(
    graph: StepGraph, inputs: Mapping[str, InputDeclaration], paths: Mapping[str, str], faults: DocumentFaults
) -> None:
    """paths: of all steps by name, also of steps that could not be read."""
    checker = _ScopeChecker(graph, inputs, paths, faults)
    top = {name: step for name, step in graph.steps.items() if not graph.outer[name]}
    checker.block(top, _VisibleNames(frozenset(top)))
    if circle := graph.circle():
        waits = " -> ".join([*circle, circle[0]])
        faults.add(graph.steps[circle[0]].path, f"these steps wait for each other: {waits}")


def check_outputs(
    graph: StepGraph,
    inputs: Mapping[str, InputDeclaration],
    outputs: Mapping[str, ValueTemplate],
    paths: Mapping[str, str],
    faults: DocumentFaults,
) -> Collection[str]:
    """Names of outputs are unique, but for arms of one switch, of which one is taken. Returns the names that are yielded."""
    found: dict[str, tuple[str, str]] = {}
    for name, step in graph.steps.items():
        in_each = any(isinstance(graph.steps[each].work, EachItem) for each in graph.around(name))
        for output, path, place in _outputs_of(step, graph):
            if in_each:
                faults.add(path, "a step within an each has no output of its own; yield the each: it has all values")
            elif output in found and not _exclusive(place, found[output][1]):
                faults.add(path, f"the output {output!r} is yielded twice, first at {found[output][0]}")
            found.setdefault(output, (path, place))
    top = frozenset(name for name in graph.steps if not graph.outer[name])
    checker = _ScopeChecker(graph, inputs, paths, faults)
    for template in outputs.values():
        checker.template(template, _VisibleNames(top))
    return found.keys()


def _outputs_of(step: WorkflowStep, graph: StepGraph) -> Iterable[tuple[str, str, str]]:
    """(name, path, place) of the outputs of a step. place: begins with the path of the arm."""
    if step.output and step.output.name:
        yield step.output.name, f"{step.path}.yield", step.path
    for at, arm in enumerate(step.work.arms if isinstance(step.work, SwitchArms) else ()):
        place = f"{step.path}.switch[{at}]"
        yield from ((name, f"{place}.emit.{name}", place) for name in arm.emit)


def _exclusive(one: str, other: str) -> bool:
    """True if two places are in different arms of one switch."""
    first, second = (f"{each}.".split(".switch[") for each in (one, other))
    for left, right in zip(first, second, strict=False):
        if left != right:
            return left.split("]")[0] != right.split("]")[0] and "]" in left and "]" in right
    return False


class _ScopeChecker:
    def __init__(
        self, graph: StepGraph, inputs: Mapping[str, InputDeclaration], paths: Mapping[str, str], faults: DocumentFaults
    ) -> None:
        self._graph, self._inputs, self._paths, self._faults = graph, inputs, paths, faults

    def block(self, block: Block, seen: _VisibleNames) -> None:
        for name, step in block.items():
            self._step(step, replace(seen, own=name))
            inner = replace(seen, own="", around=seen.around | {name})
            if isinstance(step.work, SwitchArms):
                for at, arm in enumerate(step.work.arms):
                    self._arm(step, at, inner.within(arm.steps))
                    self.block(arm.steps, inner.within(arm.steps))
            elif isinstance(step.work, EachItem):
                self._each(step, step.work, inner)

    def _step(self, step: WorkflowStep, seen: _VisibleNames) -> None:
        own_output = step.output.value if isinstance(step.output, OutputRule) else None
        for template in step.early:
            self.template(template, replace(seen, own="") if template is own_output else seen)
        for key, names in (("needs", step.needs), ("needs_any", step.needs_any), ("kill", step.kills)):
            for at, name in enumerate(names):
                self._named_step(name, f"{step.path}.{key}[{at}]", seen)
        if isinstance(step.work, ModelCall) and step.work.source:
            path, kind = f"{step.path}.{step.work.kind}.from", step.work.kind
            if self._named_step(step.work.source, path, seen):
                source = self._graph.steps[step.work.source].work
                if source.kind != kind:
                    self._faults.add(
                        path, f"a {kind} step continues a {kind} step; {step.work.source!r} is a {source.kind} step"
                    )

    def _arm(self, step: WorkflowStep, at: int, seen: _VisibleNames) -> None:
        assert isinstance(step.work, SwitchArms)
        arm, path = step.work.arms[at], f"{step.path}.switch[{at}]"
        for number, name in enumerate(arm.kills):
            self._named_step(name, f"{path}.kill[{number}]", replace(seen, own=step.name))
        if arm.value:
            self.template(arm.value, seen)
        gone = set(arm.kills) - self._graph.requires[step.name]  # a required step is done, and keeps its result
        late = [(f"{path}.value", self._graph.steps_in(arm.value))] if arm.value else []
        for place, names in [*late, *((each.path, self._graph.requires[name]) for name, each in arm.steps.items())]:
            for name in sorted(names & gone):
                self._faults.add(place, f"it needs {name!r}, which this arm kills")

    def _each(self, step: WorkflowStep, work: EachItem, seen: _VisibleNames) -> None:
        if work.variable in self._paths or work.variable in seen.variables or work.variable == INPUTS:
            self._faults.add(f"{step.path}.each.as", f"the name {work.variable!r} is taken; choose another one")
        inner = seen.within(work.steps, work.variable)
        self.template(work.value, inner)
        self.block(work.steps, inner)

    def _named_step(self, name: str, path: str, seen: _VisibleNames) -> bool:
        """True if the step is seen there, and not around it."""
        if name not in self._graph.steps:
            if name not in self._paths:
                hint = f'the input is written "${{{INPUTS}.{name}}}"' if name in self._inputs else ""
                self._faults.add(path, f"there is no step {name!r}; {hint or suggestion(name, sorted(seen.steps))}")
            return False
        reason = self._hidden(name, seen)
        if reason:
            self._faults.add(path, reason)
        return not reason

    def _hidden(self, name: str, seen: _VisibleNames) -> str:
        """A reason why a step cannot be named at a place; "": it can."""
        if name == seen.own:
            return "a step cannot refer to itself"
        if name in seen.around:
            return f"the step {name!r} is around this place, and ends after it"
        if name not in seen.steps:
            return f"the step {name!r} is inside of {self._graph.outer[name]!r}, and not seen outside of it"
        return ""

    def template(self, template: ValueTemplate, seen: _VisibleNames) -> None:
        for reference in sorted(template.references, key=str):
            if text := self._fault(reference, seen):
                goes_on = reference.member is None and template.path.endswith(".chat.from") and reference.root in seen.steps
                hint = f" (to continue its transcript, write from: {reference.root})" if goes_on else ""
                self._faults.add(template.path, text + hint)

    def _fault(self, reference: Reference, seen: _VisibleNames) -> str:
        name, read = reference
        if name in seen.variables:
            return ""
        if name == INPUTS:
            known = read is None or read in self._inputs
            return "" if known else f"there is no input {read!r}; {suggestion(str(read), self._inputs)}"
        if name not in self._graph.steps:
            if name in self._paths:
                return ""
            if name in self._inputs:
                return f"the name {name!r} is not known; write inputs.{name}"
            names = [INPUTS, *sorted(seen.variables), *sorted(seen.steps), *_CONSTANTS.values()]
            return f"the name {name!r} is not known here; {suggestion(_CONSTANTS.get(name, name), names)}"
        if reason := self._hidden(name, seen):
            return reason
        kind = self._graph.steps[name].work.kind
        members = ", ".join(f"{name}.{each}" for each in MEMBERS[kind])
        if read is None:
            return f"{name!r} is a step; its result is read as one of {members}"
        return "" if read in MEMBERS[kind] else f"a {kind} step has no .{read}; it has {members}"
