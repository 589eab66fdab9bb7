"""Fallback pools: requests that their own pool cannot serve go to another one."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature

FEATURE: Final = Feature(advice="gateway.features.fallback_pools.advice:FallbackAdvice")
