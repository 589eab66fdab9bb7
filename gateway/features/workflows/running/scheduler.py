"""The scheduler of a run: starts and kills of steps, and the events for the client. Pure.

    begin, answered, failed, streamed, used, stop ──► happenings, each with a reading of the clock
    turn ──► SchedulerTurn: calls to start and to cancel, events for the client; nothing awaits in it

A step is looked at when it is entered, and again when a step that it waits for has ended. Each look moves it at most once:

    pending ─► running ─► done         a call: its answer has arrived; `let`: at once; a block: its copies have ended
        │         └─────► failed, killed
        └───────────────► skipped, killed

A turn looks at most at LOOKS copies, so that a run with thousands of them does not hold the event loop. Then it
starts calls that are ready, at most MAX_AT_ONCE at a time: certain ones first, then in the order of the document.

Invariants: each copy ends once; a copy that has ended is not calling; after the run's last event there is no call; no output is
both confirmed and retracted (`check`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.features.workflows.language.constraints import ConstraintUnsatisfiedError
from gateway.features.workflows.language.document import (
    Block,
    ConnectorCall,
    EachItem,
    LetValue,
    ModelCall,
    SwitchArms,
    WorkflowStep,
)
from gateway.features.workflows.language.plan import MAX_AT_ONCE
from gateway.features.workflows.language.prompts import request_body
from gateway.features.workflows.language.results import CHAT, StepResult
from gateway.features.workflows.language.scheduling import (
    DONE,
    FAILED,
    KILLED,
    PENDING,
    RUNNING,
    SKIPPED,
    StepReadiness,
    readiness,
)
from gateway.features.workflows.language.templates import ValueTemplate
from gateway.features.workflows.language.values import EvaluationError, ValueTooLargeError, bytes_of, text_of
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.gate import PrefixGate, outline_of
from gateway.features.workflows.running.messages import (
    NO_TRAITS,
    CallUsage,
    CancelCall,
    EngineTraits,
    ModelAnswer,
    RunEvent,
    SchedulerTurn,
    StartCall,
    StepFailure,
)
from gateway.features.workflows.running.outputs import OutputBoard
from gateway.features.workflows.running.step_copies import NEVER, StepCopy, StepTree

LOOKS: Final = 64
MAX_RUN_BYTES: Final = 16 << 20  # of all values of a run
DEFAULT_RETRIES: Final = 1
BACKOFF_S: Final = (0.5, 1.0, 2.0)
WAIT_S: Final = 1.0  # for a limit of the caller's own key that names no time

COMPLETED, CANCELLED, INCOMPLETE = "completed", "cancelled", "incomplete"
CALL_KINDS: Final = (ModelCall, ConnectorCall)


class RunScheduler:
    """One run (see the module). status: running, completed, failed, cancelled or incomplete. error: why it failed.

    held: bytes of all values. outputs: once it has ended: its result.
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
        passed: str = "",
    ) -> None:
        """max_tokens: of a step that has none. repeatable: connectors that may be called again. passed: a step whose text the
        client gets as it comes, and which is not repeated then.
        """
        self.status = RUNNING
        self.error: StepFailure | None = None
        self.failed_step = ""
        self.reason = ""
        self.held = 0
        self.outputs: dict[str, Any] = {}
        self.tree = StepTree(workflow.graph, inputs)
        self.board = OutputBoard(self.tree, passed)
        self._passed = passed
        self._workflow = workflow
        self._max_tokens = max_tokens
        self._repeatable = repeatable
        self._run_id = run_id
        self._waiters = _waiters_of(workflow)
        self._looks = deque[StepCopy]()
        self._ready: dict[str, StepCopy] = {}
        self._engines = engines
        self._gate = PrefixGate(engines.gated) if engines.gated else None
        self._held_back: dict[str, StepCopy] = {}
        self._calling: dict[str, StepCopy] = {}
        self._calls: list[StartCall | CancelCall] = []
        self._events: list[RunEvent] = []
        self._now = 0.0

    # -- happenings

    def begin(self, now: float, bounds: Mapping[str, Any]) -> None:
        """bounds: of the plan."""
        self._now = now
        self._tell("run.created", bounds=dict(bounds))
        self._enter(self._workflow.steps, (), {}, None)

    def answered(self, name: str, answer: ModelAnswer, now: float) -> None:
        """A model has answered completely. Ignored if the step has ended."""
        one, self._now = self._calling.get(name), now
        if one is None:
            return
        call = one.step.work
        assert isinstance(call, ModelCall)
        try:
            result = self._result(one, call, answer)
        except ConstraintUnsatisfiedError as error:
            self._attempt_failed(one, StepFailure("constraint_unsatisfied", str(error), repeat=True))
        except EvaluationError as error:
            self._fail(one, _evaluation_failure(error))
        else:
            self._events += self.board.close_stream(one, answer.text)
            self._finish_call(one, result, answer.finish_reason)

    def connected(self, name: str, value: Any, now: float) -> None:
        """A connector has answered."""
        one, self._now = self._calling.get(name), now
        if one is None:
            return
        try:
            self._hold(value)
        except EvaluationError as error:
            self._fail(one, _evaluation_failure(error))
        else:
            self._finish_call(one, StepResult(DONE, value=value), None)

    def failed(self, name: str, failure: StepFailure, now: float) -> None:
        """An attempt has failed."""
        one, self._now = self._calling.get(name), now
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
        """The usage of the last attempt of a step; told before its outcome."""
        one = self._calling.get(name)
        if one is not None:
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

    # -- the crank

    def turn(self, now: float | None = None) -> SchedulerTurn:
        """Move all steps that can move. Synchronous. O(LOOKS) looks. now: None: the time of the last happening."""
        self._now = self._now if now is None else now
        left = LOOKS
        while self._looks and left and self.status == RUNNING:
            self._look(self._looks.popleft())
            self._events += self.board.settle()  # at once: a confirmation comes before all that follows from it
            left -= 1
        if self.status == RUNNING:
            if not self._looks:
                self._pass_late()
                self._start_ready()
                self._events += self.board.settle()  # a step whose request cannot be made has ended
            if self.status == RUNNING and not self.tree.live:
                self._complete()
        calls, events, self._calls, self._events = self._calls, self._events, [], []
        wake_at = min((one.passes_at for one in self._held_back.values()), default=None)
        return SchedulerTurn(calls, events, more=self.status == RUNNING and bool(self._looks), wake_at=wake_at)

    def _look(self, one: StepCopy) -> None:
        if one.over or one.calling or one.name in self._ready or one.name in self._held_back:
            return
        try:
            if one.result.status == PENDING:
                self._begin_step(one)
            elif isinstance(one.step.work, SwitchArms):
                self._finish_switch(one)
            elif isinstance(one.step.work, EachItem):
                self._finish_each(one, one.step.work)
        except EvaluationError as error:
            self._fail(one, _evaluation_failure(error))

    def _begin_step(self, one: StepCopy) -> None:
        ready = readiness(one.step, self._workflow.graph, lambda name: self._status(name, one))
        if ready is StepReadiness.WAITS:
            return
        if ready is StepReadiness.UNREACHABLE:
            self._skip(one, "dependency")
            return
        scope = self.tree.scope(one)
        if one.step.condition is not None and not one.step.condition.fill(scope):
            self._skip(one, "condition")
            return
        work = one.step.work
        if isinstance(work, CALL_KINDS):
            self._ready[one.name] = one
        elif isinstance(work, LetValue):
            value = work.value.fill(scope)
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

    def _start_ready(self) -> None:
        if not self._ready or len(self._calling) == MAX_AT_ONCE:
            return
        uncertain = {one.name: self.tree.may_be_killed(one) for one in self._ready.values()}
        for one in sorted(self._ready.values(), key=lambda one: (uncertain[one.name], one.order)):
            if self.status != RUNNING or len(self._calling) == MAX_AT_ONCE:
                return
            del self._ready[one.name]
            try:
                one.body = self._body(one)
            except EvaluationError as error:
                self._fail(one, _evaluation_failure(error))
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
        if not leader or 0 <= one.passes_at <= self._now:
            self._gate.started(one.name, outline)
            return False
        if one.gated == NEVER:
            one.gated, one.passes_at = self._now, self._now + most_s
        one.body = {}
        self._held_back[one.name] = one
        return True

    def _open_gate(self) -> None:
        self._ready |= self._held_back
        self._held_back.clear()

    def _pass_late(self) -> None:
        """Calls whose time at the gate is over start."""
        for name, one in list(self._held_back.items()):
            if one.passes_at <= self._now:
                self._ready[name] = self._held_back.pop(name)

    def _body(self, one: StepCopy) -> Mapping[str, Any]:
        """The body of its request: made when it starts, because bodies are large. Raises EvaluationError."""
        work, scope = one.step.work, self.tree.scope(one)
        if isinstance(work, ConnectorCall):
            return {"with": work.arguments.fill(scope)}
        assert isinstance(work, ModelCall)
        body = request_body(work, scope, self._max_tokens)
        if work.constraint is not None:
            body |= work.constraint.members(as_choice=work.model in self._engines.choosing)
        body["stream"] = True
        return body

    def request_id(self, name: str) -> str:
        """The id of the requests of a step, safe in headers: `run_1.section.2`."""
        return f"{self._run_id}.{name.replace('[', '.').replace(']', '')}"

    # -- blocks

    def _enter(self, block: Block, indices: tuple[int, ...], variables: Mapping[str, Any], outer: StepCopy | None) -> None:
        self._looks += self.tree.enter(block, indices, variables, outer)

    def _decide(self, one: StepCopy, work: SwitchArms) -> None:
        scope = self.tree.scope(one)
        arm = next((each for each in work.arms if each.when is None or each.when.fill(scope)), None)
        emitted = {name: value.fill(scope) for name, value in (arm.emit if arm else {}).items()}
        self._hold(emitted)
        one.decided, one.arm = True, arm
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
        value = late.fill(self.tree.scope(one)) if late else None
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
        items = work.items_for(self.tree.scope(one))
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
        return work.value.fill(self.tree.scope_of(indices, variables))

    # -- the ends of steps

    def _result(self, one: StepCopy, call: ModelCall, answer: ModelAnswer) -> StepResult:
        """Raises EvaluationError."""
        value = call.value_of(answer.text)
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
                value = rule.value.fill(self.tree.scope(one))
                self._hold(value)
            except EvaluationError as error:
                one.result = before
                self._fail(one, replace(_evaluation_failure(error), ends_run=replaced))
                return
        self._ended(one)
        if told is not None:
            self._tell("step.done", step=one.name, **told)
        if rule is not None:
            self._events.append(self.board.add(rule.name, value, one))
        self._kill_all(one.step.kills, one)

    def _attempt_failed(self, one: StepCopy, failure: StepFailure) -> None:
        most = one.step.retries if one.step.retries is not None else DEFAULT_RETRIES
        if isinstance(one.step.work, ConnectorCall) and one.step.work.use not in self._repeatable:
            most = 0
        if one.step.name == self._passed and one.streamed and not self.tree.may_be_killed(one):
            self._fail(one, failure)
            return
        if failure.waits:
            delay = failure.retry_after_s if failure.retry_after_s is not None else WAIT_S
        elif failure.repeat and one.attempts <= most:
            backoff = BACKOFF_S[min(one.attempts, len(BACKOFF_S)) - 1]
            delay = max(backoff, failure.retry_after_s or 0.0)
            one.attempts += 1
        else:
            self._fail(one, failure)
            return
        self._events += self.board.reset(one)
        uncertain = self.tree.may_be_killed(one)
        self._calls.append(StartCall(one.name, one.step, one.body, one.attempts, delay, uncertain))

    def _fail(self, one: StepCopy, failure: StepFailure) -> None:
        """Its retries are over: the run fails, or `on_error` says otherwise."""
        replacement = one.step.replacement
        if not failure.ends_run and (one.step.skips_on_error or replacement):
            if replacement is None:
                self._skip(one, "error", failure)
                return
            try:
                value = replacement.value.fill(self.tree.scope(one))
                self._hold(value)
            except EvaluationError as error:
                failure = _evaluation_failure(error)
            else:
                text = text_of(value)
                calls = isinstance(one.step.work, CALL_KINDS)
                result = StepResult(DONE, value=value, text=text, values=value if isinstance(value, list) else None)
                self._replaced(one, result, {"error": failure.as_json()} if calls else None)
                return
        one.result = StepResult(FAILED)
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
        one.result = StepResult(SKIPPED)
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
        one.result = StepResult(KILLED)
        self._ended(one)
        self._tell("step.killed", step=one.name, by=by)
        self._events += self.board.retract(one)

    def _ended(self, one: StepCopy) -> None:
        """Look at all copies that wait for this one."""
        if one.calling:
            one.calling = False
            del self._calling[one.name]
            if self._gate is not None and self._gate.ended(one.name):
                self._open_gate()
        one.ended, one.body = self._now, {}
        self.tree.live -= 1
        for name in self._waiters[one.step.name]:
            self._looks += (each for each in self.tree.within(name, one) if not each.over)
        if one.outer is not None:
            self._looks.append(one.outer)

    def _hold(self, value: Any) -> None:
        """Raises ValueTooLargeError if a value, or all values of the run together, are too large."""
        self.held += bytes_of(value)
        if self.held > MAX_RUN_BYTES:
            raise ValueTooLargeError(f"all values of a run have more than {MAX_RUN_BYTES:,} bytes")

    # -- the end of the run

    def _complete(self) -> None:
        try:
            scope = self.tree.scope_of((), {})
            templates = self._workflow.outputs
            self.outputs = self.board.values if templates is None else {k: v.fill(scope) for k, v in templates.items()}
            bytes_of(self.outputs, MAX_RUN_BYTES)
        except EvaluationError as error:
            self._end(FAILED, "", _evaluation_failure(error))
            return
        self.status = COMPLETED

    def _end(self, status: str, reason: str, failure: StepFailure | None) -> None:
        """Ends the run before all steps have ended; kills what runs."""
        for one in list(self._calling.values()):
            self._calls.append(CancelCall(one.name, killed=False))
            one.result = StepResult(KILLED)
            self._ended(one)
            self._tell("step.killed", step=one.name, by=self.failed_step or None)
        self.status, self.reason, self.error = status, reason, failure
        self.outputs = self.board.values
        self._looks.clear()
        self._ready.clear()
        self._held_back.clear()

    def _tell(self, kind: str, /, **data: Any) -> None:
        self._events.append(RunEvent(kind, data))

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        self.tree.check()
        assert all(one.calling and not one.over for one in self._calling.values())
        assert len(self._calling) <= MAX_AT_ONCE
        assert self.status == RUNNING or not (self._calling or self._ready or self._looks or self._held_back)

    def __repr__(self) -> str:
        return f"<RunScheduler {self._workflow.name} {self.status}, {self.tree.live} live, {len(self._calling)} calling>"


def _evaluation_failure(error: EvaluationError) -> StepFailure:
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
