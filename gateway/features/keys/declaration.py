"""API keys: who sends a request, what callers may do, and how much they may use."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.section import KEYS

FEATURE: Final = Feature(
    section=KEYS,
    metrics=KeyMetrics,
    commands=[Command("keys", "make, list, change, rotate and revoke API keys", "gateway.features.keys.command.keys")],
    advice="gateway.features.keys.advice:KeysAdvice",
)
