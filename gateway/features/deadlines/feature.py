"""Deadlines of requests."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.deadlines.deadlines import Deadlines
from gateway.features.deadlines.metrics import DeadlineMetrics
from gateway.request.extensions import Preparer


def install(core: Core) -> None:
    def use() -> None:
        core.extensions.entering.append(deadlines.entering)
        core.extensions.chosen.append(deadlines.chosen)
        core.observers.append(deadlines.settled)

    deadlines = Deadlines(core.metrics.of(DeadlineMetrics), core.clock, use)
    core.put(deadlines)
    core.extensions.preparers.insert(0, Preparer(deadlines.concerns, deadlines.prepare, always=True))
