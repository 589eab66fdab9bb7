"""Savings: what other routing policies would have found cached."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature

FEATURE: Final = Feature(wanted=lambda config: config.routing.compare)
