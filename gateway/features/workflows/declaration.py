"""Workflows: the whole graph of model calls in one document."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature
from gateway.features.workflows.metrics import WorkflowsMetrics
from gateway.features.workflows.section import MODEL_PREFIX, WORKFLOWS

FEATURE: Final = Feature(
    wanted=lambda config: WORKFLOWS.of(config).enabled,
    section=WORKFLOWS,
    model_prefix=MODEL_PREFIX,
    metrics=WorkflowsMetrics,
    commands=[Command("workflow", "check, compile, store and run workflows", "gateway.features.workflows.command")],
)
