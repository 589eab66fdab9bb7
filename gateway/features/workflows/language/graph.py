"""The graph of a workflow's steps: which needs which, which may kill which, which is within which.

Names of steps are unique in a document, so each map is by name. A step within a switch or an `each` begins after the step
around it; the step around it is done after all steps within it. Thus a kill of the outer one reaches the inner ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from gateway.features.workflows.language.completing import all_steps
from gateway.features.workflows.language.document import Block, ConnectorCall, ModelCall, SwitchArms, WorkflowStep
from gateway.features.workflows.language.templates import ValueTemplate


class StepGraph:
    """Maps of a workflow's steps, in the order of the document.

    outer: the step around a step; "": none. contents: all steps within a step. implied: steps that a step refers to. requires:
    these, and its `needs`: they must be done before it starts; `needs_any` is beside it. killers: steps that may kill it,
    directly or by a step around it.
    """

    def __init__(self, steps: Block) -> None:
        self.steps = dict(all_steps(steps))
        self.outer: dict[str, str] = dict.fromkeys(self.steps, "")
        self.contents: dict[str, tuple[str, ...]] = {}
        for name, step in self.steps.items():
            inner = [each for block in step.blocks for each, _ in all_steps(block)]
            self.contents[name] = tuple(inner)
            self.outer |= dict.fromkeys(inner, name)  # the innermost comes last
        self.implied = {name: self._implied(step) for name, step in self.steps.items()}
        self.requires = {
            name: self.implied[name] | ({*step.needs} & self.steps.keys()) - {name, *step.needs_any}
            for name, step in self.steps.items()
        }
        self.killers = self._killers()

    def steps_in(self, template: ValueTemplate) -> frozenset[str]:
        """The steps that a template refers to: a late value (of an arm, of an item) waits for them."""
        return frozenset(each.root for each in template.references if each.root in self.steps)

    def _implied(self, step: WorkflowStep) -> frozenset[str]:
        found = set[str]()
        for template in step.early:
            found |= self.steps_in(template)
        if isinstance(step.work, ModelCall) and step.work.source in self.steps:
            found.add(step.work.source)
        return frozenset(found - {step.name} - set(step.needs_any))

    def kills_of(self, step: WorkflowStep) -> frozenset[str]:
        """All steps that a step may kill itself, by any of its arms."""
        arms = step.work.arms if isinstance(step.work, SwitchArms) else ()
        return frozenset({*step.kills, *(name for arm in arms for name in arm.kills)})

    def _killers(self) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {name: set() for name in self.steps}
        for name, step in self.steps.items():
            for target in self.kills_of(step) & found.keys():
                for reached in (target, *self.contents[target]):
                    found[reached].add(name)
        return {name: frozenset(killers) for name, killers in found.items()}

    def around(self, name: str) -> Iterator[str]:
        """The steps around a step, the innermost first."""
        while name := self.outer[name]:
            yield name

    def calls_on_paths(self) -> dict[str, int]:
        """By step: the calls on the longest path of steps of which each needs the one before, from this step to the end of
        the run. Steps within a step count as a part of it. O(edges).
        """
        waiting: dict[str, set[str]] = {name: set() for name in self.steps}  # steps that start after a step
        late: dict[str, set[str]] = {name: set() for name in self.steps}  # steps that only end after it
        for name, step in self.steps.items():
            for each in self.requires[name].union(set(step.needs_any) & self.steps.keys()):
                waiting[each].add(name)
            for template, _ in step.late:
                for each in self.steps_in(template):
                    late[each].add(name)
        found: dict[str, int] = {}
        after: dict[str, int] = {}

        def following(name: str) -> int:
            if name not in after:
                around = set(self.around(name))
                longest = [whole(each) for each in waiting[name] - around]
                longest += map(following, (late[name] | {*islice(self.around(name), 1)}) - {name})
                after[name] = max(longest, default=0)
            return after[name]

        def whole(name: str) -> int:
            if name not in found:
                inner = max(map(whole, self.contents[name]), default=0)
                own = isinstance(self.steps[name].work, ModelCall | ConnectorCall)
                found[name] = max(inner, own + following(name))
            return found[name]

        return {name: whole(name) for name in self.steps}

    def lifted(self) -> dict[str, frozenset[str]]:
        """By step: the steps outside of it that must be done before it can be done, by itself or by steps within it."""
        found: dict[str, frozenset[str]] = {}
        for name in reversed(self.steps):  # inner steps first
            step = self.steps[name]
            needs = {*self.requires[name], *(each for each in step.needs_any if each in self.steps)}
            for template, _ in step.late:
                needs |= self.steps_in(template)
            for inner in self.contents[name]:
                needs |= found[inner]
            found[name] = frozenset(needs - {name, *self.contents[name], *self.around(name)})
        return found

    def needed_for(self, names: Iterable[str]) -> frozenset[str]:
        """These steps, all steps that they wait for, and those around and within them. O(edges)."""
        needs, found, waiting = self.lifted(), set[str](), [*names]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += [*needs[name], *self.contents[name], *self.around(name)]
        return frozenset(found)

    def circle(self) -> list[str]:
        """Steps that wait for each other, each for the next one, the last one for the first; empty: none. O(edges)."""
        needs, state = self.lifted(), dict.fromkeys(self.steps, 0)
        for start in self.steps:
            trail: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(needs[start])))] if not state[start] else []
            while trail:
                name, rest = trail[-1]
                state[name] = 1
                following = next(rest, None)
                if following is None:
                    state[name] = 2
                    trail.pop()
                elif state[following] == 1:
                    names = [each for each, _ in trail]
                    return names[names.index(following) :]
                elif state[following] == 0:
                    trail.append((following, iter(sorted(needs[following]))))
        return []
