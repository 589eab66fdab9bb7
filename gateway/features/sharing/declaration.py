"""Sharing: several gateways with a common prefix index, over a store."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.section import SHARING

FEATURE: Final = Feature(section=SHARING, metrics=SharingMetrics, advice="gateway.features.sharing.advice:SharingAdvice")
