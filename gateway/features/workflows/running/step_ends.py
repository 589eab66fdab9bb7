"""The state of a run, and the ends of its steps: done, failed and perhaps repeated, skipped, killed. Pure.

`StepEnds` is the base of the scheduler (`scheduler.py`), which has the whole picture. A copy ends once: its waiters are looked
at again, its value is yielded, and then its kills are done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.features.workflows.language.constraints import ConstraintUnsatisfiedError
from gateway.features.workflows.language.document import ConnectorCall, ModelCall, WorkflowStep
from gateway.features.workflows.language.operations import Scope, WorkBudget
from gateway.features.workflows.language.results import CHAT, StepResult
from gateway.features.workflows.language.scheduling import DONE, FAILED, KILLED, RUNNING, SKIPPED
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.values import EvaluationError, ValueTooLargeError, bytes_of, text_of
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.gate import PrefixGate
from gateway.features.workflows.running.messages import (
    NO_TRAITS,
    CancelCall,
    EngineTraits,
    ModelAnswer,
    RunEvent,
    StartCall,
    StepFailure,
)
from gateway.features.workflows.running.outputs import OutputBoard
from gateway.features.workflows.running.passing import PassingText
from gateway.features.workflows.running.step_copies import StepCopy, StepTree

MAX_RUN_BYTES: Final = 16 << 20  # of all values of a run
DEFAULT_RETRIES: Final = 1
BACKOFF_S: Final = (0.5, 1.0, 2.0)
WAIT_S: Final = 1.0  # for a limit of the caller's own key that names no time

GLANCE_WORK: Final = 2_000  # units of a look at a step that cannot move
LOOK_WORK: Final = 50_000  # units of a look at a step, and of the start of a call, without its expressions
VISIT_WORK: Final = 2000  # of a copy that a question about kills has looked at
HELD_WORK: Final = 4  # of a byte of a value that a step has

CALL_KINDS: Final = (ModelCall, ConnectorCall)


class StepEnds:
    """The state of one run. status: running, completed, failed, cancelled or incomplete. error: why it failed.

    held: bytes of all values. outputs: once it has ended: its result. repeats: of attempts, by `StepFailure.reason`.
    """

    def __init__(
        self,
        workflow: Workflow,
        inputs: Mapping[str, Any],
        max_tokens: int,
        repeatable: Collection[str] = (),
        run_id: str = "",
        *,
        engines: EngineTraits = NO_TRAITS,
        primary: str = "",
    ) -> None:
        """max_tokens: of a step that has none. repeatable: connectors that may be called again. primary: the output whose
        text the client gets as it comes; then its step is not repeated.
        """
        self.status = RUNNING
        self.error: StepFailure | None = None
        self.failed_step = ""
        self.reason = ""
        self.held = 0
        self.outputs: dict[str, Any] = {}
        self.repeats = Counter[str]()
        self.tree = StepTree(workflow.graph, inputs)
        self.board = OutputBoard(self.tree, PassingText(workflow, self.tree, primary))
        self._workflow = workflow
        self._max_tokens = max_tokens
        self._repeatable = repeatable
        self._run_id = run_id
        self._waiters = _waiters_of(workflow)
        self._looks = deque[StepCopy]()
        self._ready: dict[str, StepCopy] = {}
        self._engines = engines
        self._gate = PrefixGate(engines.gated) if engines.gated else None
        self._paths = workflow.graph.calls_on_paths() if engines.gated else {}
        self._held_back: dict[str, StepCopy] = {}
        self._calling: dict[str, StepCopy] = {}
        self._calls: list[StartCall | CancelCall] = []
        self._events: list[RunEvent] = []
        self._now = 0.0
        self._budget = WorkBudget()  # of the expressions of this look or happening
        self._work = self._most = self._visits = 0

    def _fill(self, template: ValueTemplate, scope: Scope) -> Any:
        """Raises EvaluationError, also if the expressions of this look are too much work together."""
        return template.fill(scope, self._budget)

    def _pay(self) -> None:
        """A look or a happening begins or ends: the work so far is counted, and the next one has a budget of its own."""
        visits = self.tree.visits - self._visits
        self._visits += visits
        self._work += self._budget.used + VISIT_WORK * visits
        self._budget = WorkBudget()

    def _may_work(self) -> bool:
        """True if the run goes on, and its turn too."""
        return self.status == RUNNING and self._work < self._most

    def request_id(self, name: str) -> str:
        """The id of the requests of a step, safe in headers: `run_1.section.2`."""
        return f"{self._run_id}.{name.replace('[', '.').replace(']', '')}"

    def _result(self, one: StepCopy, call: ModelCall, answer: ModelAnswer) -> StepResult:
        """Raises EvaluationError."""
        value = call.value_of(answer.text, self._budget)
        self._hold(value)
        self._hold(answer.message or answer.text)
        common: dict[str, Any] = {
            "value": value,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "usage": one.usage,
        }
        if call.kind == CHAT:
            message = answer.message or {"role": "assistant", "content": answer.text}
            messages = [*one.body["messages"], message]
            return StepResult(DONE, message=message, messages=messages, calls=list(answer.calls), **common)
        return StepResult(DONE, prompt=one.body["prompt"], **common)

    def _finish_call(self, one: StepCopy, result: StepResult, finish_reason: str | None) -> None:
        ms = round((self._now - one.started) * 1000)
        self._done(one, result, {"usage": one.usage, "finish_reason": finish_reason, "ms": ms})

    def _done(
        self, one: StepCopy, result: StepResult, told: Mapping[str, Any] | None = None, *, replaced: bool = False
    ) -> None:
        """The step has its value. told: of `step.done`; None: it has no such event. replaced: by the value for an error."""
        before, one.result = one.result, result
        rule, value = one.step.output, result.value
        if rule is not None and rule.value is not None:
            try:
                value = self._fill(rule.value, self.tree.scope(one))
                self._hold(value)
            except EvaluationError as error:
                one.result = before
                self._fail(one, replace(evaluation_failure(error), ends_run=replaced))
                return
        self._ended(one)
        if told is not None:
            self._tell("step.done", step=one.name, **told)
        if rule is not None:
            self._events.append(self.board.add(rule.name, value, one))
        self._kill_all(one.step.kills, one)

    def judged(self, name: str, outcome: Any) -> Any:
        """The outcome of an attempt; an answer that does not fit its constraint is a failure."""
        one = self._calling.get(name)
        if one is not None and isinstance(outcome, ModelAnswer) and isinstance(one.step.work, ModelCall):
            try:
                one.step.work.value_of(outcome.text)
            except ConstraintUnsatisfiedError as error:
                return unsatisfied(error)
            except EvaluationError as error:
                return evaluation_failure(error)
        return outcome

    def is_final(self, name: str, outcome: Any) -> bool:
        """True if no other attempt of the step follows, and it has not ended otherwise."""
        one = self._calling.get(name)
        return one is not None and not (isinstance(outcome, StepFailure) and self._repeats(one, outcome))

    def _repeats(self, one: StepCopy, failure: StepFailure) -> bool:
        most = one.step.retries if one.step.retries is not None else DEFAULT_RETRIES
        if isinstance(one.step.work, ConnectorCall) and one.step.work.use not in self._repeatable:
            most = 0
        if one.streamed and one is self.board.passing.source():  # its text is out
            return False
        return failure.waits or (failure.repeat and one.attempts <= most)

    def _attempt_failed(self, one: StepCopy, failure: StepFailure) -> None:
        if not self._repeats(one, failure):
            self._fail(one, failure)
            return
        if failure.waits:
            delay = failure.retry_after_s if failure.retry_after_s is not None else WAIT_S
        else:
            backoff = BACKOFF_S[min(one.attempts, len(BACKOFF_S)) - 1]
            delay = max(backoff, failure.retry_after_s or 0.0)
            one.attempts += 1
            self.repeats[failure.reason] += 1
        self._events += self.board.reset(one)
        uncertain = self.tree.may_be_killed(one)
        self._calls.append(StartCall(one.name, one.step, one.body, one.attempts, delay, uncertain))

    def _fail(self, one: StepCopy, failure: StepFailure) -> None:
        """Its retries are over: the run fails, or `on_error` says otherwise."""
        replacement = one.step.replacement
        if not failure.ends_run and (one.step.skips_on_error or replacement):
            self._events += self.board.reset(one)
            if replacement is None:
                self._skip(one, "error", failure)
                return
            self._pay()  # its own expressions may have failed for too much work
            try:
                value = self._fill(replacement.value, self.tree.scope(one))
                self._hold(value)
            except EvaluationError as error:
                failure = evaluation_failure(error)
            else:
                text = text_of(value)
                calls = isinstance(one.step.work, CALL_KINDS)
                result = StepResult(DONE, value=value, text=text, values=value if isinstance(value, list) else None)
                self._replaced(one, result, {"error": failure.as_json()} if calls else None)
                return
        one.result, one.why = StepResult(FAILED), failure.code
        self._ended(one)
        self._tell("step.failed", step=one.name, error=failure.as_json())
        self.failed_step = one.name
        self._end(FAILED, "", failure)

    def _replaced(self, one: StepCopy, result: StepResult, told: Mapping[str, Any] | None) -> None:
        """`on_error: {value: X}`: it counts as done, and continues as a plain message."""
        if isinstance(one.step.work, ModelCall) and one.step.work.kind == CHAT:
            message = {"role": "assistant", "content": result.text}
            result = replace(result, message=message, messages=[*one.body.get("messages", ()), message])
        elif isinstance(one.step.work, ModelCall):
            result = replace(result, prompt=one.body.get("prompt", ""))
        self._done(one, result, told, replaced=True)

    def _skip(self, one: StepCopy, reason: str, failure: StepFailure | None = None) -> None:
        one.result, one.why = StepResult(SKIPPED), reason
        self._ended(one)
        error = {"error": failure.as_json()} if failure else {}
        self._tell("step.skipped", step=one.name, reason=reason, **error)

    def _kill_all(self, names: Iterable[str], by: StepCopy) -> None:
        for name in names:
            target = self.tree.find(name, by.indices)
            if target is None:
                continue
            for each in list(target.family()):
                self._kill(each, by.name)

    def _kill(self, one: StepCopy, by: str) -> None:
        """Idempotent. Retracts its output."""
        if one.over:
            self._events += self.board.retract(one)
            return
        if one.calling:
            self._calls.append(CancelCall(one.name, killed=True))
        self._ready.pop(one.name, None)
        self._held_back.pop(one.name, None)
        one.result, one.why = StepResult(KILLED), by
        self._ended(one)
        self._tell("step.killed", step=one.name, by=by)
        self._events += self.board.reset(one)
        self._events += self.board.retract(one)

    def _ended(self, one: StepCopy) -> None:
        """Look at all copies that wait for this one."""
        if one.calling:
            one.calling = False
            del self._calling[one.name]
            if self._gate is not None and self._gate.ended(one.name):
                self._open_gate()
        one.ended, one.body = self._now, {}
        self.tree.end_one()
        for name in self._waiters[one.step.name]:
            self._looks += (each for each in self.tree.within(name, one) if not each.over)
        if one.outer is not None:
            self._looks.append(one.outer)

    def _open_gate(self) -> None:
        self._ready |= self._held_back
        self._held_back.clear()

    def _hold(self, value: Any) -> None:
        """Raises ValueTooLargeError if a value, or all values of the run together, are too large."""
        size = bytes_of(value)
        self.held += size
        self._work += HELD_WORK * size
        if self.held > MAX_RUN_BYTES:
            raise ValueTooLargeError(f"all values of a run have more than {MAX_RUN_BYTES:,} bytes")

    def _end(self, status: str, reason: str, failure: StepFailure | None) -> None:
        """Ends the run before all steps have ended; kills what runs."""
        for one in list(self._calling.values()):
            self._calls.append(CancelCall(one.name, killed=False))
            one.result, one.why = StepResult(KILLED), self.failed_step or None
            self._ended(one)
            self._tell("step.killed", step=one.name, by=one.why)
        self.status, self.reason, self.error = status, reason, failure
        self.outputs = self.board.values
        self._looks.clear()
        self._ready.clear()
        self._held_back.clear()

    def _tell(self, kind: str, /, **data: Any) -> None:
        self._events.append(RunEvent(kind, data))


def unsatisfied(error: ConstraintUnsatisfiedError) -> StepFailure:
    return StepFailure("constraint_unsatisfied", str(error), repeat=True)


def evaluation_failure(error: EvaluationError) -> StepFailure:
    code = "value_too_large" if isinstance(error, ValueTooLargeError) else "expression_failed"
    return StepFailure(code, str(error), status=400)


def _waiters_of(workflow: Workflow) -> dict[str, tuple[str, ...]]:
    """By step: the steps that wait for its end."""
    graph = workflow.graph
    found: dict[str, dict[str, None]] = {name: {} for name in graph.steps}
    for name, step in graph.steps.items():
        waits = {*graph.requires[name], *_named(step.needs_any, graph.steps)}
        for template, _ in step.late:
            waits |= graph.steps_in(template)
        for each in waits:
            found[each][name] = None
    return {name: tuple(waiters) for name, waiters in found.items()}


def _named(names: Iterable[str], steps: Mapping[str, WorkflowStep]) -> list[str]:
    return [name for name in names if name in steps]
