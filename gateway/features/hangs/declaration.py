"""The watch for replicas that hang."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.hangs.metrics import HangMetrics

FEATURE: Final = Feature(metrics=HangMetrics)
