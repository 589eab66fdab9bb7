"""Copies of steps in a run: a step of the document becomes one when the block that it is in is entered.

Blocks of a switch are entered when their arm is taken, blocks of an `each` once for each item. A copy is found by the name of
its step and the indices of the items around it: from within item 2, `section` is `section[2]`, and a step outside of the `each`
is itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.features.workflows.language.document import Block, EachItem, SwitchArm, WorkflowStep
from gateway.features.workflows.language.expressions import INPUTS
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.scheduling import ENDED, copy_name

NEVER: Final = -1.0


class StepCopy:
    """One copy of a step.

    variables: items of the `each` around it. outer: the copy around it. inner: of its blocks. order: place in the document,
    then among items. decided: a switch has taken its arm; arm: None: there is none. item_count: of an `each`, once it has its
    list. calling: its request is sent, or will be after a delay. started, first, ended: readings of the clock. streamed: the
    client has pieces of its text. pieces: of the text, for snapshots. shown: time of the last snapshot. gated, passes_at:
    readings of the clock when the gate has held it first, and when it opens at the latest. leader: for which it waits. why: of
    an end that is not done: the step that killed it, the reason of a skip, or the code of its failure.
    """

    __slots__ = (
        "arm",
        "attempts",
        "body",
        "calling",
        "decided",
        "ended",
        "first",
        "gated",
        "indices",
        "inner",
        "item_count",
        "leader",
        "name",
        "order",
        "outer",
        "passes_at",
        "pieces",
        "replica",
        "result",
        "shown",
        "started",
        "step",
        "streamed",
        "usage",
        "variables",
        "why",
    )

    def __init__(
        self, step: WorkflowStep, indices: tuple[int, ...], variables: Mapping[str, Any], outer: StepCopy | None, place: int
    ) -> None:
        self.step = step
        self.indices = indices
        self.variables = variables
        self.outer = outer
        self.name = copy_name(step.name, indices)
        self.order = (place, indices)
        self.inner: list[StepCopy] = []
        self.result = StepResult()
        self.arm: SwitchArm | None = None
        self.decided = self.calling = False
        self.item_count = NEVER
        self.attempts = 0
        self.body: Mapping[str, Any] = {}
        self.started = self.first = self.ended = self.gated = self.passes_at = NEVER
        self.streamed = False
        self.pieces: list[str] = []
        self.shown = NEVER
        self.usage: Mapping[str, Any] | None = None
        self.leader = self.replica = ""
        self.why: str | None = None

    @property
    def over(self) -> bool:
        """True if it has ended in any way."""
        return self.result.status in ENDED

    def family(self) -> Iterator[StepCopy]:
        """Itself, then all copies within it."""
        yield self
        for each in self.inner:
            yield from each.family()

    def __repr__(self) -> str:
        return f"<StepCopy {self.name} {self.result.status}>"


class StepTree:
    """All copies of a run. live: number of copies that have not ended. changes: copies that were entered, were decided or have
    ended so far. visits: copies that questions about kills have looked at, in all.
    """

    def __init__(self, graph: StepGraph, inputs: Mapping[str, Any]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.live = 0
        self.changes = 0
        self.visits = 0
        self._places = {name: at for at, name in enumerate(graph.steps)}
        self._copies: dict[str, dict[tuple[int, ...], StepCopy]] = {name: {} for name in graph.steps}
        self._around = {name: tuple(reversed([name, *graph.around(name)])) for name in graph.steps}
        self._items = {
            name: tuple(each for each in self._around[name][:-1] if isinstance(graph.steps[each].work, EachItem))
            for name in graph.steps
        }

    def enter(
        self, block: Block, indices: tuple[int, ...], variables: Mapping[str, Any], outer: StepCopy | None
    ) -> list[StepCopy]:
        """Copies of all steps of a block, pending."""
        made = [StepCopy(step, indices, variables, outer, self._places[name]) for name, step in block.items()]
        for each in made:
            self._copies[each.step.name][indices] = each
        if outer is not None:
            outer.inner += made
        self.live += len(made)
        self.changes += len(made)
        return made

    def end_one(self) -> None:
        """A copy has ended."""
        self.live -= 1
        self.changes += 1

    def find(self, name: str, indices: tuple[int, ...]) -> StepCopy | None:
        """The copy that a name means within these items. None: its block is not entered."""
        return self._copies[name].get(indices[: len(self._items[name])])

    def named(self, copy: str) -> StepCopy:
        """The copy with this name, such as `section[2]`. Raises KeyError."""
        step, *indices = copy.replace("]", "").split("[")
        return self._copies[step][tuple(map(int, indices))]

    def within(self, name: str, one: StepCopy) -> list[StepCopy]:
        """The copies of a step for which `one` is the copy that its name means.

        O(1) if both are within the same items, else O(copies).
        """
        shared = len(self._items[one.step.name])
        if len(self._items[name]) <= shared:
            found = self._copies[name].get(one.indices)
            return [found] if found is not None else []
        return [each for indices, each in self._copies[name].items() if indices[:shared] == one.indices]

    def all(self) -> Iterator[StepCopy]:
        """All copies, in the order of the document."""
        for copies in self._copies.values():
            yield from copies.values()

    def scope(self, one: StepCopy) -> RunScope:
        return RunScope(self, one.indices, one.variables)

    def scope_of(self, indices: tuple[int, ...], variables: Mapping[str, Any]) -> RunScope:
        """The names that are seen within these items."""
        return RunScope(self, indices, variables)

    def may_be_killed(self, one: StepCopy) -> bool:
        """True while a step that is undecided could kill this copy. O(copies of its killers)."""
        return any(self._undecided(killer, one) for killer in self.graph.killers[one.step.name])

    def _undecided(self, killer: str, target: StepCopy) -> bool:
        chain, own = self._around[killer], self._around[target.step.name]
        shared = sum(1 for each in self._items[killer] if each in own)
        top = self._copies[chain[0]].get(())
        return top is not None and self._may_still_kill(top, chain, 1, target, target.indices[:shared])

    def _may_still_kill(
        self, one: StepCopy, chain: tuple[str, ...], depth: int, target: StepCopy, shared: tuple[int, ...]
    ) -> bool:
        """chain[depth:]: names of steps within `one`, down to the killer."""
        self.visits += 1
        if one.over:
            return False
        if depth == len(chain):
            return self._kills(one, target)
        if not (one.decided or one.item_count >= 0):
            return True  # its blocks are not entered yet
        inner = (each for each in one.inner if each.step.name == chain[depth] and _agree(each.indices, shared))
        return any(self._may_still_kill(each, chain, depth + 1, target, shared) for each in inner)

    def _kills(self, killer: StepCopy, target: StepCopy) -> bool:
        names = set(killer.step.kills) if killer.decided else self.graph.kills_of(killer.step)
        return not names.isdisjoint(self._around[target.step.name])

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        copies = list(self.all())
        assert self.live == sum(not each.over for each in copies)
        for each in copies:
            assert each.outer is None or each in each.outer.inner
            assert not (each.over and each.calling)
            assert not each.over or all(inner.over for inner in each.inner)


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(left == right for left, right in zip(one, other, strict=False))


class RunScope(Mapping[str, Any]):
    """Values of expressions at one place of a run: inputs, variables, results of steps."""

    def __init__(self, tree: StepTree, indices: tuple[int, ...], variables: Mapping[str, Any]) -> None:
        self._tree = tree
        self._indices = indices
        self._variables = variables

    def __getitem__(self, name: str) -> Any:
        if name in self._variables:
            return self._variables[name]
        if name == INPUTS:
            return self._tree.inputs
        if name not in self._tree.graph.steps:
            raise KeyError(name)
        found = self._tree.find(name, self._indices)
        return found.result if found is not None else StepResult()

    def __iter__(self) -> Iterator[str]:
        yield from (INPUTS, *self._variables, *self._tree.graph.steps)

    def __len__(self) -> int:
        return sum(1 for _ in self)
