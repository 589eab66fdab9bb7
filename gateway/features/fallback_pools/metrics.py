"""Metrics of the feature `fallback_pools`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class FallbackMetrics:
    """Requests that moved to another pool."""

    def __init__(self, make: MetricFamily) -> None:
        self.fallbacks = make.counter(
            "fallbacks_total",
            "Requests handed on to the pool of a fallback, by why theirs could not serve them.",
            "pool",
            "to",
            "reason",
        )
