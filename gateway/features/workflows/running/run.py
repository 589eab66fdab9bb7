"""One run of a workflow: does what its scheduler says, and tells the client.

    scheduler.turn ──► calls: a task each ──► answers, failures, pieces of text ──► scheduler ──► turn ...
                  └──► events ──► emit, numbered          └── journal: durable first ──┘

`run` returns after the last event, when no task of the run is left; cancelled, it cancels all of them first. Only a run in the
background has a journal (`recorded.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from gateway.errors import GatewayError, internal_error, over_budget
from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.scheduling import FAILED, KILLED, RUNNING, SKIPPED
from gateway.features.workflows.running.calls import ModelCallAttempt
from gateway.features.workflows.running.messages import (
    NO_TRAITS,
    CancelCall,
    ModelAnswer,
    RunEvent,
    SchedulerTurn,
    StartCall,
    StepContext,
    StepFailure,
)
from gateway.features.workflows.running.recorded import RecordedStep, ResumedRun, RunJournal, RunProgress
from gateway.features.workflows.running.replay import RunReplay, tell
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from gateway.features.workflows.running.run_usage import RunUsage
from gateway.features.workflows.running.scheduler import CANCELLED, COMPLETED, INCOMPLETE, RunScheduler
from gateway.features.workflows.running.step_copies import StepCopy
from gateway.features.workflows.running.step_request import failure_of
from gateway.request.client import ClientRequest

log = logging.getLogger("warmroute.workflows")

EVENTS: Final = {COMPLETED: "run.completed", FAILED: "run.failed", CANCELLED: "run.cancelled", INCOMPLETE: "run.incomplete"}
_WHY: Final = {KILLED: "killed_by", SKIPPED: "reason", FAILED: "error"}  # members of a step, by its status
OUT_OF_TIME: Final = "run_timeout"
OUT_OF_MONEY: Final = "cost_usd"


class WorkflowRun:
    """asked: the request of the client. emit: gets each event with its number. journal: None: the run belongs to its client's
    connection.
    """

    def __init__(
        self,
        id_: str,
        order: RunOrder,
        asked: ClientRequest,
        services: RunServices,
        emit: Callable[[int, RunEvent], None],
        journal: RunJournal | None = None,
    ) -> None:
        self.id = id_
        self._order = order
        self._asked = asked
        self._models, self._connectors = services.models, services.connectors
        self._clock, self._turns = services.clock, services.turns
        now = services.wall_clock()
        self._emit = emit
        self._journal = journal
        self._resumed = journal.resumed if journal is not None else None
        self._recorded: dict[str, RecordedStep] = {}
        self._number = self._resumed.number if self._resumed is not None else 0
        self.created_at = int(self._resumed.created_at if self._resumed is not None else now)
        self._elapsed_s = max(0.0, now - self.created_at) if self._resumed is not None else 0.0
        self._replay: RunReplay | None = None
        self._stop_later: tuple[str, str, StepFailure | None] | None = None
        if self._resumed is not None and self._resumed.cancelled:
            self._stop_later = CANCELLED, "", None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = set[asyncio.Task[None]]()
        self._attempts: dict[str, ModelCallAttempt] = {}
        self._charged = 0
        self._begun = 0.0
        self._ended = -1.0
        self._over = asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None
        repeatable = services.connectors.repeatable
        engines = order.engines
        if self._resumed is not None:  # its prompts are computed
            engines = engines._replace(gated=NO_TRAITS.gated)
        self.scheduler = RunScheduler(
            order.workflow, order.inputs, order.max_tokens, repeatable, id_, engines=engines, primary=order.primary
        )
        fields_of_steps = {"run": id_, "workflow": order.label}
        self._context = StepContext(fields_of_steps, order.defined, order.notes)
        self._usage = RunUsage(self.scheduler, order.cost_usd)
        self.receipt = self._usage.receipt

    async def run(self) -> None:
        """Until the last event. Raises CancelledError."""
        loop, resumed = asyncio.get_running_loop(), self._resumed
        self._begun = self._clock() - self._elapsed_s
        deadline = loop.call_later(max(0.0, self._order.seconds - self._elapsed_s), self._stop, INCOMPLETE, OUT_OF_TIME)
        try:
            if resumed is None:
                self.scheduler.begin(self._begun, self._bounds)
                self._turn()
            else:
                await self._resume(resumed)
            await self._over.wait()
            await self._settled()
            last = self.as_json(steps=False)
            if self._journal is not None:
                await self._journal.end(self.scheduler.status, self.as_json(), self._number)
            self._tell(RunEvent(EVENTS[self.scheduler.status], last))
        finally:
            deadline.cancel()
            self._stop(CANCELLED)  # unless it has ended
            self._turns.forget(self._turn)
            if self._waking is not None:
                self._waking.cancel()
            await self._settled()
            self._ended = self._clock()

    def cancel(self) -> None:
        """Ends it with all its events. Ignored if it has ended."""
        self._stop(CANCELLED)

    def _stop(self, status: str, reason: str = "", failure: StepFailure | None = None) -> None:
        if self._replay is not None:
            self._stop_later = status, reason, failure
            return
        self.scheduler.stop(status, self._clock(), reason, failure)
        self._turn()

    @property
    def _bounds(self) -> dict[str, int]:
        plan = self._order.plan
        return {"calls": plan.calls, "output_tokens": plan.output_tokens, "widest": plan.widest}

    async def _resume(self, resumed: ResumedRun) -> None:
        """Goes on with a run of another gateway."""
        self._replay = replay = RunReplay(self.scheduler, resumed, self._usage, self._turns, self._begun)
        try:
            calls, starts = await replay.run()
        finally:
            self._replay = None
        self._recorded = replay.left
        recorded = [each.name for each in resumed.steps]
        board = self.scheduler.board
        state = {"outputs": board.values, "provisional": board.provisional}
        self._tell(RunEvent("run.resumed", {"bounds": self._bounds, "recorded": recorded, **state}))
        if self._stop_later is not None:
            self._stop(*self._stop_later)
            return
        self._handle(SchedulerTurn(calls, starts, more=self.scheduler.status == RUNNING))

    async def _settled(self) -> None:
        """Waits for the end of all tasks."""
        while tasks := [*self._ending, *self._tasks.values()]:
            await asyncio.wait(tasks)
            self._ending.difference_update(tasks)
            self._tasks = {name: task for name, task in self._tasks.items() if task not in tasks}

    # -- turns

    def _turn(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        turn = self.scheduler.turn(self._clock(), self._turns.left)
        self._turns.spend(turn.work)
        self._handle(turn)

    def _handle(self, turn: SchedulerTurn) -> None:
        for event in turn.events:
            self._tell(event)
        for call in turn.calls:
            if isinstance(call, CancelCall):
                self._cancel(call)
            else:
                self._start(call)
        if turn.more:
            self._turns.wait(self._turn)  # a run that waits already keeps its place
        else:
            self._turns.forget(self._turn)
            if turn.wake_at is not None:
                self._waking = asyncio.get_running_loop().call_later(max(0.0, turn.wake_at - self._clock()), self._turn)
        if self.scheduler.held > self._charged and self.scheduler.status == RUNNING:
            self._charge(self.scheduler.held - self._charged)
        if self.scheduler.status != RUNNING:
            self._over.set()

    def _charge(self, size: int) -> None:
        """Charges the values of the run to its client."""
        lease = self._asked.lease
        if lease.grow(size):
            self._charged += size
        else:
            self._stop(FAILED, "", failure_of(over_budget(0, lease.account.largest)))

    def _tell(self, event: RunEvent) -> None:
        self._emit(self._number, event)
        self._number += 1

    def _cancel(self, call: CancelCall) -> None:
        task = self._tasks.pop(call.name, None)
        if task is None:
            return  # a run that was stopped while it was resumed has no calls yet
        attempt = self._attempts.pop(call.name, None)
        if attempt is not None and call.killed:
            attempt.kill()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    def _start(self, call: StartCall) -> None:
        previous = self._tasks.pop(call.name, None)
        if previous is not None:  # it has told its failure, and ends now
            self._ending.add(previous)
            previous.add_done_callback(self._ending.discard)
        self._tasks[call.name] = asyncio.get_running_loop().create_task(self._call(call), name=f"step {call.name}")

    # -- calls

    async def _call(self, call: StartCall) -> None:
        try:
            await self._attempt(call)
        except GatewayError as error:  # of the journal
            self._stop(FAILED, "", failure_of(error))
        except Exception:  # a bug must end its own run only
            log.exception("a step failed by a bug", extra={"run": self.id, "step": call.name})
            self._stop(FAILED, "", failure_of(internal_error()))

    async def _attempt(self, call: StartCall) -> None:
        if call.delay_s:
            await asyncio.sleep(call.delay_s)
        recorded = self._recorded.pop(call.name, None)
        if recorded is not None:
            outcome = recorded.outcome
        elif isinstance(call.step.work, ConnectorCall):
            outcome = await self._connected(call, call.step.work)
        else:
            if not self._affords(call):
                self._stop(INCOMPLETE, OUT_OF_MONEY)
                return
            outcome = await self._modelled(call)
        if self._journal is not None and recorded is None:
            outcome = await self._journaled(self._journal, call, outcome)
        if self._tasks.get(call.name) is not asyncio.current_task():
            return  # it was cancelled, and has ended before it noticed
        tell(self.scheduler, call.name, outcome, self._clock())
        if self._tasks.get(call.name) is asyncio.current_task():
            self._ending.add(task := self._tasks.pop(call.name))
            task.add_done_callback(self._ending.discard)
        self._turn()

    async def _journaled(self, journal: RunJournal, call: StartCall, outcome: Any) -> Any:
        """The outcome, which is durable then if it is final. Raises GatewayError."""
        outcome = self.scheduler.judged(call.name, outcome)
        if self.scheduler.is_final(call.name, outcome):
            progress = RunProgress(self._number, self.receipt.as_json())
            await journal.record(RecordedStep(call.name, outcome, self._usage.of(call.name)), progress)
        return outcome

    async def _connected(self, call: StartCall, work: ConnectorCall) -> Any:
        """Raises GatewayError."""
        if failure := await self._models.require_connector(self._asked, defined=self._context.defined):
            return failure
        if self._journal is not None and work.use not in self._connectors.repeatable:
            if self._resumed is not None and call.name in self._resumed.called:
                return StepFailure("connector_interrupted", f"The connector {work.use!r} was called, and its answer is lost.")
            await self._journal.call(call.name)
        try:
            async with asyncio.timeout(call.step.timeout_s):
                return await self._connectors.call(work.use, call.body["with"], self.scheduler.request_id(call.name))
        except TimeoutError:
            return _late(call)

    async def _modelled(self, call: StartCall) -> ModelAnswer | StepFailure:
        def stream(text: str) -> None:
            self.scheduler.streamed(call.name, text, self._clock())
            self._turn()

        id_ = self.scheduler.request_id(call.name)
        attempt = self._models.prepare(self._asked, id_, call, stream, self._context)
        self._attempts[call.name] = attempt
        outcome: ModelAnswer | StepFailure | None = None
        try:
            async with asyncio.timeout(call.step.timeout_s):
                outcome = await attempt.run()
        except TimeoutError:
            outcome = _late(call)
        finally:
            if self._attempts.get(call.name) is attempt:
                del self._attempts[call.name]
            self._usage.count(call, attempt.usage, outcome)
        return outcome

    def _affords(self, call: StartCall) -> bool:
        """False if the worst price of the call could exceed the run's limit."""
        return not self._usage.limited or self._usage.affords(call.name, self._models.worst_usd(call))

    # -- the run as JSON

    @property
    def counted_as(self) -> str:
        """The workflow in metrics."""
        return self._order.counted_as

    @property
    def usage(self) -> Mapping[str, Any]:
        return self._usage.as_json()

    def as_json(self, *, steps: bool = True) -> dict[str, Any]:
        scheduler, order = self.scheduler, self._order
        found: dict[str, Any] = {
            "id": self.id,
            "object": "workflow.run",
            "status": scheduler.status,
            "workflow": order.workflow.name,
            "version": order.version,
            "created_at": self.created_at,
            "outputs": scheduler.outputs,
            "provisional": scheduler.board.provisional,
            "error": scheduler.error.as_json(scheduler.failed_step) if scheduler.error else None,
            "usage": self.usage,
            "metadata": dict(order.metadata),
        }
        if scheduler.status == INCOMPLETE:
            found["incomplete_details"] = {"reason": scheduler.reason}
        if steps:
            found["steps"] = self._steps(replicas=order.see_replicas)
        return found

    def row(self, max_steps: int) -> dict[str, Any]:
        """The run for operators, without texts. max_steps: the first ones of the document."""
        scheduler = self.scheduler
        return {
            "id": self.id,
            "workflow": self._order.workflow.name,
            "status": scheduler.status,
            "created_at": self.created_at,
            "elapsed_ms": self._ms(self._ended if self._ended >= 0 else self._clock()),
            "reason": scheduler.reason or (scheduler.error.code if scheduler.error else ""),
            "failed_step": scheduler.failed_step,
            "usage": self.usage,
            "outputs": {name: each.state for name, each in scheduler.board.outputs.items()},
            "steps": self._steps(replicas=True, most=max_steps),
        }

    def _steps(self, *, replicas: bool, most: int | None = None) -> list[dict[str, Any]]:
        calls = (one for one in self.scheduler.tree.all() if isinstance(one.step.work, ModelCall | ConnectorCall))
        return [self._step(one, replicas=replicas) for one in islice(calls, most)]

    def _step(self, one: StepCopy, *, replicas: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": one.name,
            "kind": one.step.work.kind,
            "status": one.result.status,
            "started_ms": self._ms(one.started),
            "first_ms": self._ms(one.first),
            "done_ms": self._ms(one.ended),
            "attempts": one.attempts,
        }
        if one.gated >= 0 and one.started >= 0:
            found["gate_ms"] = round((one.started - one.gated) * 1000)
        if one.attempts:
            found["request"] = self.scheduler.request_id(one.name)
        if one.usage is not None:
            found |= one.usage
        if one.why is not None:
            found[_WHY[one.result.status]] = one.why
        if replicas and one.replica:
            found["replica"] = one.replica
        return found

    def _ms(self, moment: float) -> int | None:
        return round((moment - self._begun) * 1000) if moment >= 0 else None

    def __repr__(self) -> str:
        return f"<WorkflowRun {self.id} {self.scheduler!r}>"


def _late(call: StartCall) -> StepFailure:
    text = f"The step took more than {call.step.timeout_s:g} seconds (timeout_s)."
    return StepFailure("step_failed", text, 504, repeat=True, cause="timeout")
