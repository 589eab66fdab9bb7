"""Savings of the routing in comparison with other policies."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.savings.metrics import SavingsMetrics
from gateway.features.savings.section import COMPARE

FEATURE: Final = Feature(wanted=COMPARE.of, section=COMPARE, metrics=SavingsMetrics)
