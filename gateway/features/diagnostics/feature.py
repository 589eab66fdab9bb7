"""Answers to Anthropic's `diagnostics` field."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.diagnostics.diagnoses import Diagnoses


def install(core: Core) -> None:
    diagnoses = Diagnoses(core.clock)
    core.extensions.chosen.append(diagnoses.chosen)
    core.extensions.delivered.append(diagnoses.delivered)
