"""Engines that take retention hints are asked to keep the prompts of sessions longer than others."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.retention.section import RETAIN

FEATURE: Final = Feature(wanted=RETAIN.of, section=RETAIN)
