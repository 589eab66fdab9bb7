"""A scheduler of workflows with a clock that is a number: calls take their time, and answer by name of step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gateway.features.workflows.language.document import ConnectorCall, ModelCall
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.messages import (
    CallUsage,
    EngineTraits,
    GatedEngine,
    ModelAnswer,
    RunEvent,
    StartCall,
    StepFailure,
)
from gateway.features.workflows.running.scheduler import RunScheduler
from tests.support.workflows import prose, tokens

MAX_TURNS = 100_000
WAKE = "#wake"
GATED = GatedEngine(8000.0)


def written(answer: Any, name: str, kind: str) -> str:
    """The text of an answer; a number: of tokens."""
    return (" " if kind == "text" else "") + prose(answer, name) if isinstance(answer, int) else str(answer)


class ScriptedRun:
    """answers, seconds: by name of a step. connectors: by name. failures: of attempts, by name of a copy, the first one first.

    pieces: number of pieces in which texts are streamed. engine: of all models. said: events as "kind NAME". prompts: bodies by
    copy.
    """

    def __init__(
        self,
        workflow: Workflow,
        inputs: Mapping[str, Any],
        answers: Mapping[str, Any],
        *,
        connectors: Mapping[str, Any] | None = None,
        seconds: Mapping[str, float] | None = None,
        failures: Mapping[str, list[StepFailure]] | None = None,
        jitter: Callable[[], float] = lambda: 1.0,
        pieces: int = 0,
        repeatable: tuple[str, ...] = (),
        engine: GatedEngine = GATED,
    ) -> None:
        models = {step.work.model for step in workflow.graph.steps.values() if isinstance(step.work, ModelCall)}
        engines = EngineTraits(dict.fromkeys(models, engine))
        self.scheduler = RunScheduler(
            workflow, read_inputs(workflow.inputs, dict(inputs)), 1024, repeatable, "run_1", engines=engines
        )
        self.events: list[RunEvent] = []
        self.prompts: dict[str, Mapping[str, Any]] = {}
        self.calls: list[StartCall] = []
        self.peak = 0
        self.now = 0.0
        self._answers, self._connectors = answers, connectors or {}
        self._seconds, self._failures = seconds or {}, {name: list(each) for name, each in (failures or {}).items()}
        self._jitter, self._pieces = jitter, pieces
        self._due: list[tuple[float, int, str, int, Callable[[], None]]] = []
        self._running: dict[str, int] = {}
        self._serial = self._pushed = 0

    def run(self, stop: Callable[[ScriptedRun], None] | None = None) -> ScriptedRun:
        """stop: called after each turn."""
        self.scheduler.begin(0.0, {})
        self._turn()
        for _ in range(MAX_TURNS):
            if not self._due or self.scheduler.status != "running":
                break
            self.now, _, name, serial, happen = heapq.heappop(self._due)
            if name == WAKE or self._running.get(name) == serial:
                happen()
                self._turn()
                if stop is not None:
                    stop(self)
                    self._turn()
        self.scheduler.check()
        assert self.scheduler.status != "running", (self.scheduler, self.said)
        assert not self._running, "after the end nothing runs"
        return self

    @property
    def said(self) -> list[str]:
        return [" ".join([kind, *filter(None, [data.get("step") or data.get("name")])]) for kind, data in self.events]

    def told(self, kind: str, name: str) -> Mapping[str, Any]:
        (found,) = [data for each, data in self.events if each == kind and name in (data.get("step"), data.get("name"))]
        return found

    def _turn(self) -> None:
        more = True
        while more:
            calls, events, more, wake_at, _ = self.scheduler.turn(self.now)
            if wake_at is not None and not more:
                self._push(max(wake_at, self.now), WAKE, 0, lambda: None)
            self.events += events
            for call in calls:
                if isinstance(call, StartCall):
                    self._start(call)
                else:
                    del self._running[call.name]
            self.peak = max(self.peak, len(self._running))
            self.scheduler.check()

    def _start(self, call: StartCall) -> None:
        name, step = call.name, call.step
        self.calls.append(call)
        self.prompts[name] = call.body
        failures = self._failures.get(name)
        failure = failures.pop(0) if failures else None
        seconds = call.delay_s + self._seconds.get(step.name, 1.0) * self._jitter()
        self._serial += 1
        serial = self._running[name] = self._serial
        text = "" if isinstance(step.work, ConnectorCall) else written(self._answers[step.name], name, step.work.kind)
        size = -(-len(text) // self._pieces) if self._pieces else 0
        for at in range(self._pieces if text else 0):
            moment = self.now + call.delay_s + (seconds - call.delay_s) * (at + 1) / (self._pieces + 1)
            self._push(moment, name, serial, partial(self._stream, name, text[at * size : (at + 1) * size]))
        self._push(self.now + seconds, name, serial, partial(self._finish, call, text, failure))

    def _push(self, moment: float, name: str, serial: int, happen: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._due, (moment, self._pushed, name, serial, happen))

    def _stream(self, name: str, piece: str) -> None:
        self.scheduler.streamed(name, piece, self.now)

    def _finish(self, call: StartCall, text: str, failure: StepFailure | None) -> None:
        del self._running[call.name]
        work = call.step.work
        if failure is not None:
            self.scheduler.failed(call.name, failure, self.now)
        elif isinstance(work, ConnectorCall):
            self.scheduler.connected(call.name, self._connectors.get(work.use), self.now)
        else:
            self.scheduler.used(call.name, CallUsage(100, 0, len(tokens(text))))
            self.scheduler.answered(call.name, ModelAnswer(text), self.now)
