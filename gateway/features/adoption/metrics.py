"""Metrics of the feature `adoption`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class AdoptionMetrics:
    """Answers whose clients left before their end."""

    def __init__(self, make: MetricFamily) -> None:
        self.abandoned = make.counter(
            "abandoned_answers_total",
            "Answers that went on after their client had left (limits.adopt_s), by what became of them: adopted by the same"
            " request, expired, failed, too_large, second, continued.",
            "result",
        )
