"""Savings: what other routing policies would have found cached."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.savings.metrics import SavingsMetrics

FEATURE: Final = Feature(metrics=SavingsMetrics, wanted=lambda config: config.routing.compare)
