"""The runs of this process for the live page, recorded only while an operator asks. Never texts.

The first question starts the watch. WATCH_S after the last one it ends, and all rows of ended runs are freed. Running runs are
known at any time: they hold their own state. A row has names, times and tokens; inputs, prompts, answers and outputs, and
messages of errors, which may quote them, are in no row.

Bounds: MAX_RUNS rows, the runs that ended first are dropped first; MAX_STEPS steps of a run are shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from gateway.cluster.commands import ControlPlane
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get

if TYPE_CHECKING:
    from gateway.features.workflows.running.run import WorkflowRun

TOPIC: Final = "workflow_runs"
WATCH_S: Final = 60.0
MAX_RUNS: Final = 50
MAX_STEPS: Final = 300

Row = dict[str, Any]
"""A run in the format of docs/ui.md."""


class RecentRuns:
    """clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, WorkflowRun] = {}
        self._ended: OrderedDict[str, Row] = OrderedDict()
        self._watched_until = float("-inf")

    def __len__(self) -> int:
        """Number of running runs."""
        return len(self._running)

    def begin(self, run: WorkflowRun) -> None:
        self._running[run.id] = run

    def end(self, run: WorkflowRun) -> None:
        """The run has ended in any way."""
        del self._running[run.id]
        if self._clock() < self._watched_until:
            self._ended[run.id] = run.row(MAX_STEPS)
            while len(self._ended) > MAX_RUNS:
                self._ended.popitem(last=False)

    def answer(self, _question: bytes = b"") -> bytes:
        """The latest rows, as msgpack. O(rows)."""
        self._watched_until = self._clock() + WATCH_S
        running = list(self._running.values())[-MAX_RUNS:]
        return msgspec.msgpack.encode([*(run.row(MAX_STEPS) for run in running), *self._ended.values()])

    def sweep(self, now: float) -> None:
        """Ends a watch without questions. To be called about every second."""
        if now >= self._watched_until:
            self._ended.clear()


class RunEndpoints:
    """GET /warmroute/runs: the latest runs of all processes, the newest first."""

    def __init__(self, operator: Operator, control: ControlPlane) -> None:
        self._operator = operator
        self._control = control

    def routes(self) -> list[Route]:
        return [get("/warmroute/runs", self.runs)]

    async def runs(self, request: HttpRequest) -> Response:
        """The first question starts the watch. A late worker is left out."""
        self._operator.allow(request)
        answers = (await self._control.ask(TOPIC)).values()
        rows: list[Row] = [row for answer in answers for row in msgspec.msgpack.decode(answer)]
        rows.sort(key=lambda row: (row["created_at"], row["id"]), reverse=True)
        body = {"watches_for_s": WATCH_S, "runs": rows[:MAX_RUNS]}
        return Response(orjson.dumps(body), headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
