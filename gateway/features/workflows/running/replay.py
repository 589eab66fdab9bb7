"""A new scheduler is brought to the state of a run whose gateway has stopped, by the recorded outcomes of its steps.

    begin ──► turns ──► calls ──► the outcome of the next record ──► turns ──► ... ──► calls that have no record

Expressions, switches and kills follow from the outcomes, and outcomes are applied in the order of their records. So each step
is in the state that it had, and the other gateway has not finished the calls without a record.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.features.workflows.language.scheduling import RUNNING
from gateway.features.workflows.running.messages import ModelAnswer, RunEvent, StartCall, StepFailure
from gateway.features.workflows.running.recorded import RecordedStep, ResumedRun
from gateway.features.workflows.running.run_turns import RunTurns
from gateway.features.workflows.running.run_usage import RunUsage
from gateway.features.workflows.running.scheduler import RunScheduler
from gateway.features.workflows.running.step_copies import NEVER


class RunReplay:
    """left: records of steps that have not started again; they are applied when these start. now: a reading of the clock."""

    def __init__(self, scheduler: RunScheduler, resumed: ResumedRun, usage: RunUsage, turns: RunTurns, now: float) -> None:
        self.left: dict[str, RecordedStep] = {}
        self._scheduler = scheduler
        self._resumed = resumed
        self._usage = usage
        self._loop = turns
        self._now = now
        self._calls: dict[str, StartCall] = {}
        self._starts: dict[str, RunEvent] = {}

    async def run(self) -> tuple[list[StartCall], list[RunEvent]]:
        """The calls without a record, and the events of their starts. O(copies of steps)."""
        scheduler = self._scheduler
        scheduler.begin(self._now, {})
        await self._turns()
        for record in self._resumed.steps:
            self.left[record.name] = record
            self._apply(record.name)
            await self._turns()
        if self._resumed.receipt:
            self._usage.receipt.restore(self._resumed.receipt)
        for one in scheduler.tree.all():
            if one.over:
                one.started = one.first = one.ended = NEVER  # its times are of another clock
        events = list[RunEvent]()
        for name, call in self._calls.items():
            output = call.step.output
            if output is not None and output.stream:
                events.append(RunEvent("output.reset", {"name": output.name}))
            events.append(self._starts[name])
        return list(self._calls.values()), events

    async def _turns(self) -> None:
        more = True
        while more and self._scheduler.status == RUNNING:
            calls, events, more, _, work = self._scheduler.turn(self._now, self._loop.left)
            self._loop.spend(work)
            self._starts |= {event.data["step"]: event for event in events if event.kind == "step.started"}
            for call in calls:
                if not isinstance(call, StartCall):
                    self._calls.pop(call.name, None)
                    continue
                self._calls[call.name] = call
                if self._apply(call.name):
                    more = True
            await asyncio.sleep(0)  # others have their turn

    def _apply(self, name: str) -> bool:
        """Applies the record of a step, if it has started. True: it has."""
        record, call = self.left.get(name), self._calls.get(name)
        if record is None or call is None:
            return False
        del self.left[name], self._calls[name]
        if record.usage is not None:
            self._usage.count(call, record.usage, record.outcome)
        tell(self._scheduler, name, record.outcome, self._now)
        return True


def tell(scheduler: RunScheduler, name: str, outcome: Any, now: float) -> None:
    """Tells a scheduler the outcome of an attempt: a ModelAnswer, a StepFailure, or the value of a connector."""
    if isinstance(outcome, StepFailure):
        scheduler.failed(name, outcome, now)
    elif isinstance(outcome, ModelAnswer):
        scheduler.answered(name, outcome, now)
    else:
        scheduler.connected(name, outcome, now)
