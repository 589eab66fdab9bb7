"""Fallback pools: requests that their own pool cannot serve go to another one."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.fallback_pools.metrics import FallbackMetrics

FEATURE: Final = Feature(metrics=FallbackMetrics, advice="gateway.features.fallback_pools.advice:FallbackAdvice")
