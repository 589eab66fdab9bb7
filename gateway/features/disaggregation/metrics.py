"""Metrics of the feature `disaggregation`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class DisaggregationMetrics:
    """Where prompts of decoders were computed."""

    def __init__(self, make: MetricFamily) -> None:
        self.prompts = make.counter(
            "disaggregated_prompts_total",
            "Prompts of decoders, by where they were computed, and why: remote, or local and the reason.",
            "pool",
            "way",
        )
        self.prefill_seconds = make.seconds(
            "prefill_leg", "Seconds from the choice of a prefiller to the end of its leg.", "pool"
        )
