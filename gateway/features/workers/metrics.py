"""Metrics of the feature `workers`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class WorkerMetrics:
    """Workers of this gateway."""

    def __init__(self, make: MetricFamily) -> None:
        self.restarts = make.counter("worker_restarts_total", "Workers that exited and were replaced.")
