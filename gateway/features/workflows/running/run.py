"""One run of a workflow: does what its scheduler says, and tells the client.

    scheduler.turn ──► calls: a task each ──► answers, failures, pieces of text ──► scheduler ──► turn ...
                  └──► events ──► emit, numbered

`run` returns after the last event, when no task of the run is left; cancelled, it cancels all of them first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from gateway.errors import internal_error, over_budget
from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.plan import WorkflowPlan
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.language.scheduling import FAILED, RUNNING
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.calls import ModelCallAttempt, ModelCalls
from gateway.features.workflows.running.messages import (
    NO_TRAITS,
    CallUsage,
    CancelCall,
    EngineTraits,
    ModelAnswer,
    RunEvent,
    StartCall,
    StepFailure,
)
from gateway.features.workflows.running.outputs import RETRACTED
from gateway.features.workflows.running.receipt import Receipt, message_bytes
from gateway.features.workflows.running.scheduler import CANCELLED, COMPLETED, INCOMPLETE, RunScheduler
from gateway.features.workflows.running.step_copies import StepCopy
from gateway.features.workflows.running.step_request import failure_of
from gateway.request.client import ClientRequest

log = logging.getLogger("warmroute.workflows")

EVENTS: Final = {COMPLETED: "run.completed", FAILED: "run.failed", CANCELLED: "run.cancelled", INCOMPLETE: "run.incomplete"}
OUT_OF_TIME: Final = "run_timeout"
OUT_OF_MONEY: Final = "cost_usd"


class ConnectorCaller(Protocol):
    """Calls the services that are no models."""

    @property
    def repeatable(self) -> frozenset[str]:
        """Names of connectors that may be called again."""

    async def call(self, use: str, arguments: Any, key: str) -> Any:
        """The answer, or a StepFailure. key: of idempotency."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """The workflow to run, with its inputs and bounds.

    version: of a stored workflow; None: it has none. seconds, cost_usd: bounds; None: no bound. see_replicas: the client may
    know them. engines: of its models. passed: a step whose text the client gets as it comes. defined: by the operator, so that
    the caller need not have its models.
    """

    workflow: Workflow
    plan: WorkflowPlan
    inputs: Mapping[str, Any]
    max_tokens: int
    seconds: float
    cost_usd: float | None = None
    version: int | None = None
    see_replicas: bool = False
    engines: EngineTraits = NO_TRAITS
    passed: str = ""
    defined: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunServices:
    """The surroundings of all runs. clock: monotonic seconds. wall_clock: Unix seconds."""

    models: ModelCalls
    connectors: ConnectorCaller
    clock: Callable[[], float]
    wall_clock: Callable[[], float]


class WorkflowRun:
    """asked: the request of the client. emit: gets each event with its number."""

    def __init__(
        self,
        id_: str,
        order: RunOrder,
        asked: ClientRequest,
        services: RunServices,
        emit: Callable[[int, RunEvent], None],
    ) -> None:
        self.id = id_
        self.receipt = Receipt()
        self._order = order
        self._asked = asked
        self._models, self._connectors = services.models, services.connectors
        self._clock = services.clock
        self.created_at = int(services.wall_clock())
        self._emit = emit
        self._number = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = set[asyncio.Task[None]]()
        self._attempts: dict[str, ModelCallAttempt] = {}
        self._tokens: dict[str, int] = {}  # of answers of steps that are done
        self._charged = 0
        self._begun = 0.0
        self._over = asyncio.Event()
        self._turning: asyncio.Handle | None = None
        self._committed: dict[str, float] = {}  # the worst price of each call that runs
        repeatable = services.connectors.repeatable
        self.scheduler = RunScheduler(
            order.workflow, order.inputs, order.max_tokens, repeatable, id_, engines=order.engines, passed=order.passed
        )

    async def run(self) -> None:
        """Until the last event. Raises CancelledError."""
        loop = asyncio.get_running_loop()
        self._begun = self._clock()
        deadline = loop.call_later(self._order.seconds, self._stop, INCOMPLETE, OUT_OF_TIME)
        try:
            plan = self._order.plan
            bounds = {"calls": plan.calls, "output_tokens": plan.output_tokens, "widest": plan.widest}
            self.scheduler.begin(self._begun, bounds)
            self._turn()
            await self._over.wait()
            await self._settled()
            self._tell(RunEvent(EVENTS[self.scheduler.status], self.as_json(steps=False)))
        finally:
            deadline.cancel()
            self._stop(CANCELLED)  # unless it has ended
            if self._turning is not None:
                self._turning.cancel()
            await self._settled()

    def _stop(self, status: str, reason: str = "", failure: StepFailure | None = None) -> None:
        self.scheduler.stop(status, self._clock(), reason, failure)
        self._turn()

    async def _settled(self) -> None:
        """Waits for the end of all tasks."""
        while tasks := [*self._ending, *self._tasks.values()]:
            await asyncio.wait(tasks)
            self._ending.difference_update(tasks)
            self._tasks = {name: task for name, task in self._tasks.items() if task not in tasks}

    # -- turns

    def _turn(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
            self._turning = None
        turn = self.scheduler.turn(self._clock())
        for event in turn.events:
            self._tell(event)
        for call in turn.calls:
            if isinstance(call, CancelCall):
                self._cancel(call)
            else:
                self._start(call)
        if turn.more:
            self._turning = asyncio.get_running_loop().call_soon(self._turn)
        elif turn.wake_at is not None:
            self._turning = asyncio.get_running_loop().call_later(max(0.0, turn.wake_at - self._clock()), self._turn)
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
        task = self._tasks.pop(call.name)
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
        except Exception:  # a bug must end its own run only
            log.exception("a step failed by a bug", extra={"run": self.id, "step": call.name})
            self._stop(FAILED, "", failure_of(internal_error()))

    async def _attempt(self, call: StartCall) -> None:
        if call.delay_s:
            await asyncio.sleep(call.delay_s)
        if isinstance(call.step.work, ConnectorCall):
            outcome = await self._connected(call, call.step.work)
        else:
            if not self._affords(call):
                self._stop(INCOMPLETE, OUT_OF_MONEY)
                return
            outcome = await self._modelled(call)
        if self._tasks.get(call.name) is not asyncio.current_task():
            return  # it was cancelled, and has ended before it noticed
        now = self._clock()
        if isinstance(outcome, StepFailure):
            self.scheduler.failed(call.name, outcome, now)
        elif isinstance(outcome, ModelAnswer):
            self.scheduler.answered(call.name, outcome, now)
        else:
            self.scheduler.connected(call.name, outcome, now)
        if self._tasks.get(call.name) is asyncio.current_task():
            self._ending.add(task := self._tasks.pop(call.name))
            task.add_done_callback(self._ending.discard)
        self._turn()

    async def _connected(self, call: StartCall, work: ConnectorCall) -> Any:
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
        attempt = self._models.prepare(self._asked, id_, call, stream, defined=self._order.defined)
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
            self._count(call, attempt.usage, outcome)
        return outcome

    def _affords(self, call: StartCall) -> bool:
        """False if the worst price of the call could exceed the run's limit."""
        most = self._order.cost_usd
        if most is None:
            return True
        worst = self._models.worst_usd(call)
        if self.receipt.cost_usd + sum(self._committed.values()) + worst > most:
            return False
        self._committed[call.name] = worst
        return True

    def _count(self, call: StartCall, usage: CallUsage, outcome: ModelAnswer | StepFailure | None) -> None:
        """Counts the usage of an attempt. outcome: None: it was cancelled."""
        self._committed.pop(call.name, None)
        self.receipt.count(usage)
        self.scheduler.used(call.name, usage)
        if isinstance(outcome, ModelAnswer):
            self._tokens[call.name] = usage.completion_tokens
        else:
            self.receipt.wasted += usage.completion_tokens
        work = call.step.work
        if not isinstance(work, ModelCall) or not usage.prompt_tokens:
            return
        answer = outcome if isinstance(outcome, ModelAnswer) else None
        continued: list[bytes] = []
        if work.kind == CHAT:
            prompt = [message_bytes(each) for each in call.body["messages"]]
            if answer is not None:
                continued = [*prompt, message_bytes(answer.message)]
        else:
            prompt = [call.body["prompt"].encode("utf-8", "surrogatepass")]
            if answer is not None:
                continued = [prompt[0] + answer.text.encode("utf-8", "surrogatepass")]
        self.receipt.union.add(work.model, prompt, usage.prompt_tokens, continued, usage.completion_tokens)

    # -- the run as JSON

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
            "usage": self._usage(),
            "metadata": dict(order.metadata),
        }
        if scheduler.status == INCOMPLETE:
            found["incomplete_details"] = {"reason": scheduler.reason}
        if steps:
            found["steps"] = [
                self._step(one) for one in scheduler.tree.all() if isinstance(one.step.work, ModelCall | ConnectorCall)
            ]
        return found

    def _usage(self) -> dict[str, Any]:
        usage = self.receipt.as_json()
        retracted = {each.source.name for each in self.scheduler.board.found.values() if each.state == RETRACTED}
        usage["wasted_tokens"] += sum(self._tokens.get(name, 0) for name in retracted)
        return usage

    def _step(self, one: StepCopy) -> dict[str, Any]:
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
        if self._order.see_replicas and one.replica:
            found["replica"] = one.replica
        return found

    def _ms(self, moment: float) -> int | None:
        return round((moment - self._begun) * 1000) if moment >= 0 else None

    def __repr__(self) -> str:
        return f"<WorkflowRun {self.id} {self.scheduler!r}>"


def _late(call: StartCall) -> StepFailure:
    text = f"The step took more than {call.step.timeout_s:g} seconds (timeout_s)."
    return StepFailure("step_failed", text, 504, repeat=True, cause="timeout")
