"""The prompt log: names of conversations."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature
from gateway.features.prompt_log.metrics import PromptLogMetrics
from gateway.features.prompt_log.section import PROMPT_LOG

FEATURE: Final = Feature(
    wanted=lambda config: PROMPT_LOG.of(config) or any(pool.delta for pool in config.pools),
    section=PROMPT_LOG,
    metrics=PromptLogMetrics,
    commands=[
        Command("log", "names of conversations, and where two of them differ", "gateway.features.prompt_log.command"),
        Command(
            "sync",
            "a local gateway whose conversations go to another one in parts",
            "gateway.features.prompt_log.delta.command",
        ),
    ],
)
