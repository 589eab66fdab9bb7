"""The scheduler of a run: starts and kills of steps, and the events for the client. Pure.

    begin, answered, failed, streamed, used, stop ──► happenings, each with a reading of the clock
    turn ──► SchedulerTurn: calls to start and to cancel, events for the client; nothing awaits in it

A step is looked at when it is entered, and again when a step that it waits for has ended. Each look moves it at most once:

    pending ─► running ─► done         a call: its answer has arrived; `let`: at once; a block: its copies have ended
        │         └─────► failed, killed
        └───────────────► skipped, killed

A turn ends when its work is used up, so that no run holds the event loop: looks, expressions and prompts count, and the rest
follows in the next turn. The expressions of one look have a bound of their own (`WorkBudget`). When nothing is left to look at,
calls that are ready start, at most MAX_AT_ONCE at a time: certain ones first, then in the order of the document.

How steps start and end is in `step_starts.py` and `step_ends.py`.

Invariants: each copy ends once; a copy that has ended is not calling; after the run's last event there is no call; no output is
both confirmed and retracted (`check`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.features.workflows.language.constraints import ConstraintUnsatisfiedError
from gateway.features.workflows.language.document import EachItem, ModelCall, SwitchArms
from gateway.features.workflows.language.plan import MAX_AT_ONCE
from gateway.features.workflows.language.results import StepResult
from gateway.features.workflows.language.scheduling import DONE, FAILED, PENDING, RUNNING
from gateway.features.workflows.language.values import EvaluationError, bytes_of
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, SchedulerTurn, StepFailure
from gateway.features.workflows.running.step_copies import NEVER, StepCopy
from gateway.features.workflows.running.step_ends import GLANCE_WORK, LOOK_WORK, MAX_RUN_BYTES, evaluation_failure, unsatisfied
from gateway.features.workflows.running.step_starts import StepStarts

TURN_WORK: Final = 8_000_000  # units of about a nanosecond
COMPLETED, CANCELLED, INCOMPLETE = "completed", "cancelled", "incomplete"


class RunScheduler(StepStarts):
    """One run (see the module)."""

    def begin(self, now: float, bounds: Mapping[str, Any]) -> None:
        """bounds: of the plan."""
        self._now = now
        self._tell("run.created", bounds=dict(bounds))
        self._enter(self._workflow.steps, (), {}, None)

    def answered(self, name: str, answer: ModelAnswer, now: float) -> None:
        """A model has answered completely. Ignored if the step has ended."""
        one, self._now = self._calling.get(name), now
        self._pay()
        if one is None:
            return
        call = one.step.work
        assert isinstance(call, ModelCall)
        try:
            result = self._result(one, call, answer)
        except ConstraintUnsatisfiedError as error:
            self._attempt_failed(one, unsatisfied(error))
        except EvaluationError as error:
            self._fail(one, evaluation_failure(error))
        else:
            self._events += self.board.close_stream(one, answer.text)
            self._finish_call(one, result, answer.finish_reason)

    def connected(self, name: str, value: Any, now: float) -> None:
        """A connector has answered."""
        one, self._now = self._calling.get(name), now
        self._pay()
        if one is None:
            return
        try:
            self._hold(value)
        except EvaluationError as error:
            self._fail(one, evaluation_failure(error))
        else:
            self._finish_call(one, StepResult(DONE, value=value), None)

    def failed(self, name: str, failure: StepFailure, now: float) -> None:
        """An attempt has failed."""
        one, self._now = self._calling.get(name), now
        self._pay()
        if one is not None:
            self._attempt_failed(one, failure)

    def streamed(self, name: str, text: str, now: float) -> None:
        """A piece of a model's answer; "": the engine has begun to write."""
        one, self._now = self._calling.get(name), now
        if one is not None:
            if one.first == NEVER:
                one.first = now
                if self._gate is not None and self._gate.first_token(name):
                    self._open_gate()
            self._events += self.board.stream(one, text, now)

    def used(self, name: str, usage: CallUsage) -> None:
        """The usage of the last attempt of a step; told before its outcome, of a killed one after it."""
        one = self.tree.named(name)
        one.replica = usage.replica
        one.usage = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }

    def stop(self, status: str, now: float, reason: str = "", failure: StepFailure | None = None) -> None:
        """Ends the run from outside: cancelled, incomplete (reason: the limit), or failed. Ignored if it has ended."""
        self._now = now
        if self.status == RUNNING:
            self._end(status, reason, failure)

    def turn(self, now: float | None = None, most: int = TURN_WORK) -> SchedulerTurn:
        """Move all steps that can move. Synchronous. now: None: the time of the last happening.

        most: units of work. The turn ends with the first step that exceeds them, and at once if there are none.
        """
        self._now = self._now if now is None else now
        self._most = most
        while self._looks and self._may_work():
            self._look(self._looks.popleft())
            self._settle()  # at once: a confirmation comes before all that follows from it
        if not self._looks and self._may_work():
            self._pass_late()
            self._start_ready()
            self._settle()  # a step whose request cannot be made has ended
            if not self.tree.live and self._may_work():
                self._complete()
        self._pay()
        calls, events, self._calls, self._events = self._calls, self._events, [], []
        work, self._work = self._work, 0
        more = self.status == RUNNING and (bool(self._looks) or not self.tree.live or self._starts_next())
        wake_at = min((one.passes_at for one in self._held_back.values()), default=None)
        return SchedulerTurn(calls, events, more, wake_at, work)

    def _settle(self) -> None:
        self._events += self.board.settle()
        self._pay()

    def _look(self, one: StepCopy) -> None:
        if one.over or one.calling or one.name in self._ready or one.name in self._held_back:
            self._work += GLANCE_WORK
            return
        self._work += LOOK_WORK
        try:
            if one.result.status == PENDING:
                self._begin_step(one)
            elif isinstance(one.step.work, SwitchArms):
                self._finish_switch(one)
            elif isinstance(one.step.work, EachItem):
                self._finish_each(one, one.step.work)
        except EvaluationError as error:
            self._fail(one, evaluation_failure(error))

    def _complete(self) -> None:
        try:
            scope = self.tree.scope_of((), {})
            templates = self._workflow.outputs
            self.outputs = self.board.values if templates is None else {k: self._fill(v, scope) for k, v in templates.items()}
            bytes_of(self.outputs, MAX_RUN_BYTES)
        except EvaluationError as error:
            self._end(FAILED, "", evaluation_failure(error))
            return
        self.status = COMPLETED

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.tree.check()
        assert all(one.calling and not one.over for one in self._calling.values())
        assert len(self._calling) <= MAX_AT_ONCE
        assert self.status == RUNNING or not (self._calling or self._ready or self._looks or self._held_back)

    def __repr__(self) -> str:
        return f"<RunScheduler {self._workflow.name} {self.status}, {self.tree.live} live, {len(self._calling)} calling>"
