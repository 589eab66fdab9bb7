"""Cache events of engines."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.kv_events.metrics import KvEventMetrics
from gateway.features.kv_events.section import KV_EVENTS

FEATURE: Final = Feature(
    wanted=lambda config: KV_EVENTS.of(config).follow,
    section=KV_EVENTS,
    metrics=KvEventMetrics,
    advice="gateway.features.kv_events.advice:KvEventsAdvice",
)
