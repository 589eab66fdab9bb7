"""Metrics of the feature `audit`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class AuditMetrics:
    """Findings about replicas."""

    def __init__(self, make: MetricFamily) -> None:
        self.findings = make.gauge(
            "replica_finding",
            "1 while answers of the replica contradict what the gateway knows: its findings are in docs/audit.md; then 0.",
            "replica",
            "finding",
        )
