"""Answers to Anthropic's `diagnostics` field."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature

FEATURE: Final = Feature()
