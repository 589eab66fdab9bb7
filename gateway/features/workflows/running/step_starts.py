"""The starts of steps: of calls, which wait at the gate, of switches and of the items of an `each`. Pure.

`StepStarts` is a part of the scheduler (`scheduler.py`). Of calls that are ready at most MAX_AT_ONCE run at a time: certain
ones first, with a gate those on the longest path, which lead the others, then in the order of the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.features.workflows.language.document import Block, ConnectorCall, EachItem, LetValue, ModelCall, SwitchArms
from gateway.features.workflows.language.plan import MAX_AT_ONCE
from gateway.features.workflows.language.prompts import request_body
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.scheduling import DONE, PENDING, RUNNING, StepReadiness, readiness
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.values import EvaluationError, text_of
from gateway.features.workflows.running.gate import outline_of
from gateway.features.workflows.running.messages import StartCall
from gateway.features.workflows.running.step_copies import NEVER, StepCopy
from gateway.features.workflows.running.step_ends import CALL_KINDS, LOOK_WORK, StepEnds, evaluation_failure


class StepStarts(StepEnds):
    """Starts steps, in addition to ending them."""

    def _begin_step(self, one: StepCopy) -> None:
        ready = readiness(one.step, self._workflow.graph, lambda name: self._status(name, one))
        if ready is StepReadiness.WAITS:
            return
        if ready is StepReadiness.UNREACHABLE:
            self._skip(one, "dependency")
            return
        scope = self.tree.scope(one)
        if one.step.condition is not None and not self._fill(one.step.condition, scope):
            self._skip(one, "condition")
            return
        work = one.step.work
        if isinstance(work, CALL_KINDS):
            self._ready[one.name] = one
        elif isinstance(work, LetValue):
            value = self._fill(work.value, scope)
            self._hold(value)
            self._done(one, StepResult(DONE, value=value, text=text_of(value)))
        elif isinstance(work, SwitchArms):
            one.result = StepResult(RUNNING)
            self._decide(one, work)
        else:
            one.result = StepResult(RUNNING)
            self._enter_items(one, work)

    def _status(self, name: str, one: StepCopy) -> str:
        found = self.tree.find(name, one.indices)
        return found.result.status if found is not None else PENDING

    def _starts_next(self) -> bool:
        """True if a call is ready, and may start."""
        return bool(self._ready) and len(self._calling) < MAX_AT_ONCE

    def _start_ready(self) -> None:
        if not self._starts_next():
            return
        uncertain = {one.name: self.tree.may_be_killed(one) for one in self._ready.values()}

        def place(one: StepCopy) -> tuple[bool, int, tuple[int, tuple[int, ...]]]:
            return uncertain[one.name], -self._paths.get(one.step.name, 0), one.order

        for one in sorted(self._ready.values(), key=place):
            self._pay()
            self._work += LOOK_WORK
            if not self._may_work() or len(self._calling) == MAX_AT_ONCE:
                return
            del self._ready[one.name]
            try:
                one.body = self._body(one)
            except EvaluationError as error:
                self._fail(one, evaluation_failure(error))
                continue
            if self._hold_back(one):
                continue
            one.result = StepResult(RUNNING)
            one.calling, one.attempts, one.started = True, 1, self._now
            self._calling[one.name] = one
            self._calls.append(StartCall(one.name, one.step, one.body, uncertain=uncertain[one.name]))
            waited = {"gate_ms": round((self._now - one.gated) * 1000)} if one.gated != NEVER else {}
            self._tell("step.started", step=one.name, kind=one.step.work.kind, request=self.request_id(one.name), **waited)

    def _hold_back(self, one: StepCopy) -> bool:
        """True if it waits at the gate. Its body is made anew when it starts, because bodies are large."""
        work = one.step.work
        if self._gate is None or not isinstance(work, ModelCall) or work.model not in self._engines.gated:
            return False
        outline = outline_of(one.body)
        leader, most_s = self._gate.leader(outline)
        if not leader or (leader == one.leader and one.passes_at <= self._now):
            self._gate.started(one.name, outline)
            return False
        if one.gated == NEVER:
            one.gated = self._now
        if leader != one.leader:
            one.leader, one.passes_at = leader, self._now + most_s
        one.body = {}
        self._held_back[one.name] = one
        return True

    def _pass_late(self) -> None:
        """Calls whose time at the gate is over start."""
        for name, one in list(self._held_back.items()):
            if one.passes_at <= self._now:
                self._ready[name] = self._held_back.pop(name)

    def _body(self, one: StepCopy) -> Mapping[str, Any]:
        """The body of its request: made when it starts, because bodies are large. Raises EvaluationError."""
        work, scope = one.step.work, self.tree.scope(one)
        if isinstance(work, ConnectorCall):
            return {"with": self._fill(work.arguments, scope)}
        assert isinstance(work, ModelCall)
        body = request_body(work, scope, self._max_tokens, self._budget)
        if work.constraint is not None:
            body |= work.constraint.members(as_choice=work.model in self._engines.choosing)
        body["stream"] = True
        return body

    def _enter(self, block: Block, indices: tuple[int, ...], variables: Mapping[str, Any], outer: StepCopy | None) -> None:
        self._looks += self.tree.enter(block, indices, variables, outer)

    def _decide(self, one: StepCopy, work: SwitchArms) -> None:
        scope = self.tree.scope(one)
        arm = next((each for each in work.arms if each.when is None or self._fill(each.when, scope)), None)
        emitted = {name: self._fill(value, scope) for name, value in (arm.emit if arm else {}).items()}
        self._hold(emitted)
        one.decided, one.arm = True, arm
        self.tree.changes += 1
        self._tell("step.decided", step=one.name, arm=work.arms.index(arm) if arm else None)
        for name, value in emitted.items():
            self._events.append(self.board.add(name, value, one))
        if arm is not None:
            self._kill_all(arm.kills, one)
            if not one.over:
                self._enter(arm.steps, one.indices, one.variables, one)
        self._looks.append(one)

    def _finish_switch(self, one: StepCopy) -> None:
        late = one.arm.value if one.arm else None
        if not all(each.over for each in one.inner) or not self._all_over(late, one.indices):
            return
        if not self._all_done(late, one.indices):
            self._skip(one, "dependency")
            return
        value = self._fill(late, self.tree.scope(one)) if late else None
        self._hold(value)
        self._done(one, StepResult(DONE, value=value))

    def _all_over(self, late: ValueTemplate | None, indices: tuple[int, ...]) -> bool:
        """True if all steps that a late value refers to have ended."""
        return all(each.over for each in self._referred(late, indices))

    def _all_done(self, late: ValueTemplate | None, indices: tuple[int, ...]) -> bool:
        return all(each.result.status == DONE for each in self._referred(late, indices))

    def _referred(self, late: ValueTemplate | None, indices: tuple[int, ...]) -> list[StepCopy]:
        names = self._workflow.graph.steps_in(late) if late else ()
        return [found for name in names if (found := self.tree.find(name, indices))]

    def _enter_items(self, one: StepCopy, work: EachItem) -> None:
        items = work.items_for(self.tree.scope(one), self._budget)
        one.item_count = len(items)
        for at, item in enumerate(items):
            self._enter(work.steps, (*one.indices, at), {**one.variables, work.variable: item}, one)
        self._looks.append(one)

    def _finish_each(self, one: StepCopy, work: EachItem) -> None:
        if not all(each.over for each in one.inner) or not self._all_over(work.value, one.indices):
            return
        items = {each.indices[-1]: each.variables for each in one.inner}
        values = [self._item_value(one, work, at, items[at]) for at in range(int(one.item_count))]
        self._hold(values)
        self._done(one, StepResult(DONE, value=values, values=values))

    def _item_value(self, one: StepCopy, work: EachItem, at: int, variables: Mapping[str, Any]) -> Any:
        """Null if it needs a step that is not done."""
        indices = (*one.indices, at)
        if not self._all_done(work.value, indices):
            return None
        return self._fill(work.value, self.tree.scope_of(indices, variables))
