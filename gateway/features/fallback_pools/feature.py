"""Fallback pools: requests that their own pool cannot serve go to another one."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.fallback_pools.fallbacks import Fallbacks
from gateway.features.fallback_pools.metrics import FallbackMetrics


def install(core: Core) -> None:
    core.extensions.fallback = Fallbacks(
        live=core.live, fleet=core.fleet, parsing=core.parsing, metrics=core.metrics.of(FallbackMetrics), clock=core.clock
    )
