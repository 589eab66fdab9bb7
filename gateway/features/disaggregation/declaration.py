"""Disaggregated prefill and decode."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.disaggregation.metrics import DisaggregationMetrics
from gateway.features.disaggregation.section import DISAGGREGATION

FEATURE: Final = Feature(
    section=DISAGGREGATION,
    metrics=DisaggregationMetrics,
    advice="gateway.features.disaggregation.advice:DisaggregationAdvice",
)
