"""Sources of replicas other than the configuration."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.discovery.metrics import DiscoveryMetrics
from gateway.features.discovery.section import DISCOVERY

FEATURE: Final = Feature(
    section=DISCOVERY, metrics=DiscoveryMetrics, advice="gateway.features.discovery.advice:DiscoveryAdvice"
)
