"""Runs of workflows with a journal in memory, whose process may stop at any record: models and connectors are functions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.calls import ModelCalls
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, RunEvent, StartCall, StepFailure
from gateway.features.workflows.running.recorded import RecordedStep, ResumedRun, RunJournal, RunProgress
from gateway.features.workflows.running.run import WorkflowRun
from gateway.features.workflows.running.run_order import RunOrder, RunServices
from tests.support.in_memory import BytesRequest

ALLOWANCE = RunAllowance(max_calls=1 << 20, max_output_tokens=1 << 30)
USAGE = CallUsage(100, 50, 3, 0.25, "r")


class MemoryJournal(RunJournal):
    """stops_at: number of the record before which, or after which, its process stops; None: never."""

    def __init__(self, stops_at: int | None = None, *, after: bool = False, resumed: ResumedRun | None = None) -> None:
        self.resumed = resumed
        self.steps = list(resumed.steps) if resumed is not None else []
        self.called = set(resumed.called) if resumed is not None else set()
        self.receipt: Mapping[str, Any] = {}
        self.stopped = asyncio.Event()
        self.ended: Mapping[str, Any] | None = None
        self.number = 0
        self._stops_at, self._after = stops_at, after
        self._lock = asyncio.Lock()

    async def call(self, name: str) -> None:
        self.called.add(name)

    async def record(self, step: RecordedStep, progress: RunProgress) -> None:
        async with self._lock:
            last = self._stops_at is not None and len(self.steps) >= self._stops_at
            if not last or self._after:
                await asyncio.sleep(0)
                assert step.name not in {each.name for each in self.steps}, "a recorded step has run again"
                self.steps.append(step)
                self.number, self.receipt = progress.number, progress.receipt
            if last:
                self.stopped.set()
                await asyncio.Event().wait()

    async def end(self, status: str, run: Mapping[str, Any], number: int) -> None:
        self.ended = run

    def adopted(self, number: int) -> ResumedRun:
        recorded = {each.name for each in self.steps}
        return ResumedRun(number, 0.0, self.steps, frozenset(self.called - recorded), len(self.steps), self.receipt)


class _Attempt:
    usage = USAGE

    def __init__(self, answer: Callable[[], ModelAnswer | StepFailure], pauses: int) -> None:
        self._answer, self._pauses = answer, pauses

    def kill(self) -> None:
        pass

    async def run(self) -> ModelAnswer | StepFailure:
        for _ in range(self._pauses):
            await asyncio.sleep(0)
        return self._answer()


class JournaledRuns:
    """One run, in one process after the other. answers: by step, or by copy. failures: of copies. called: each call, in order.

    events: of all processes, with their numbers.
    """

    def __init__(
        self,
        workflow: Workflow,
        inputs: Mapping[str, Any],
        answers: Mapping[str, str],
        *,
        failures: Mapping[str, StepFailure] | None = None,
        repeatable: frozenset[str] = frozenset(),
        chance: random.Random | None = None,
    ) -> None:
        self.workflow, self.called, self.events = workflow, list[str](), list[tuple[int, RunEvent]]()
        self.repeatable = repeatable
        self._answers, self._failures, self._chance = answers, failures or {}, chance or random.Random(1)
        inputs = read_inputs(workflow.inputs, dict(inputs))
        self._order = RunOrder(workflow, plan_of(workflow, ALLOWANCE), inputs, 1024, 600.0)
        self._services = RunServices(cast(ModelCalls, self), self, lambda: 1.0, lambda: 1.0)

    async def require_connector(self, asked: BytesRequest, *, defined: bool) -> None:
        """Any call is allowed."""

    def prepare(self, _asked: Any, _id: str, call: StartCall, stream: Callable[[str], None], _context: Any) -> Any:
        self.called.append(call.name)
        failure = self._failures.get(call.name)
        text = self._answers.get(call.name, self._answers.get(call.step.name, "text"))

        def answer() -> ModelAnswer | StepFailure:
            if failure is not None:
                return failure
            stream(text)
            return ModelAnswer(text, {"role": "assistant", "content": text})

        return _Attempt(answer, self._chance.randint(0, 6))

    async def call(self, use: str, arguments: Any, key: str) -> Any:
        self.called.append(key)
        for _ in range(self._chance.randint(0, 6)):
            await asyncio.sleep(0)
        return None if use == "null" else {"use": use}

    def run(self, journal: MemoryJournal) -> WorkflowRun:
        def emit(number: int, event: RunEvent) -> None:
            self.events.append((number, event))

        return WorkflowRun("run_1", self._order, BytesRequest(b"", "/"), self._services, emit, journal)

    async def process(self, journal: MemoryJournal) -> WorkflowRun:
        """Runs it until it ends, or its process stops."""
        run = self.run(journal)
        running = asyncio.get_running_loop().create_task(run.run())
        stopped = asyncio.get_running_loop().create_task(journal.stopped.wait())
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        told = len(self.events)
        stopped.cancel()
        running.cancel()
        await asyncio.gather(running, stopped, return_exceptions=True)
        if not running.cancelled():
            running.result()
        else:
            del self.events[told:]  # a process that stops tells nothing more
        return run
