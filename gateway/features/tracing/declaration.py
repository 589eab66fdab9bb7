"""Tracing: spans of requests, sent to a collector."""

from __future__ import annotations

from typing import Final

from gateway.config.listen import OFF
from gateway.features.declaring import Feature
from gateway.features.tracing.metrics import TracingMetrics
from gateway.features.tracing.section import TRACING

FEATURE: Final = Feature(
    wanted=lambda config: TRACING.of(config).endpoint != OFF,
    section=TRACING,
    metrics=TracingMetrics,
    advice="gateway.features.tracing.advice:TracingAdvice",
)
