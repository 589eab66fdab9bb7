"""Deadlines of requests."""

from __future__ import annotations

from typing import Final

from gateway.features.deadlines.metrics import DeadlineMetrics
from gateway.features.declaring import Feature

FEATURE: Final = Feature(metrics=DeadlineMetrics)
