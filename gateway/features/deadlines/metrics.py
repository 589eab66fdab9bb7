"""Metrics of the feature `deadlines`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class DeadlineMetrics:
    """Requests that could not be answered in the time that their client allows."""

    def __init__(self, make: MetricFamily) -> None:
        self.exceeded = make.counter(
            "deadlines_exceeded_total",
            "Requests that their deadline ended (504): foreseen by the estimate, in the queue of a pool (queued), or at a"
            " replica (running).",
            "reason",
        )
