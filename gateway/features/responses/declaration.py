"""Stored responses and conversations, and background responses."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.responses.metrics import ResponsesMetrics
from gateway.features.responses.section import STATE

FEATURE: Final = Feature(section=STATE, metrics=ResponsesMetrics)
