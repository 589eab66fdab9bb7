"""The prompt log: names of conversations."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.section import PROMPT_LOG

FEATURE: Final = Feature(
    wanted=PROMPT_LOG.of,
    section=PROMPT_LOG,
    metrics=PromptLogMetrics,
    commands=[Command("log", "names of conversations, and where two of them differ", "gateway.features.prompt_log.command")],
)
