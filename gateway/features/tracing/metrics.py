"""Metrics of the feature `tracing`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class TracingMetrics:
    """Exported spans."""

    def __init__(self, make: MetricFamily) -> None:
        self.exported = make.counter("spans_exported_total", "Spans of traces that a collector has taken.")
        self.dropped = make.counter(
            "spans_dropped_total",
            "Spans that were not exported: queue_full (the collector, or this process, did not keep up), failed (not taken).",
            "reason",
        )
