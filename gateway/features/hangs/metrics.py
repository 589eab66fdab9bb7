"""Metrics of the feature `hangs`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class HangMetrics:
    """Replicas that hang, and their requests."""

    def __init__(self, make: MetricFamily) -> None:
        self.hung = make.gauge(
            "replica_hung",
            "1 while the replica answers its probes, but generates nothing: other replicas get its requests; else 0.",
            "replica",
        )
        self.moved = make.counter(
            "hung_requests_moved_total", "Requests without a first token that were moved from a replica that hangs.", "replica"
        )
        self.checks = make.counter(
            "hang_checks_total",
            "Generations of one token that the gateway sent to a silent replica itself: answered, unanswered,"
            " or refused, which shows nothing.",
            "replica",
            "result",
        )
