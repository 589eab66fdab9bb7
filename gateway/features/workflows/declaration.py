"""Workflows: the whole graph of model calls in one document."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Command, Feature
from gateway.features.workflows.section import WORKFLOWS

FEATURE: Final = Feature(
    wanted=lambda _config: False,  # commands only: nothing of it is installed on a gateway
    section=WORKFLOWS,
    commands=[Command("workflow", "check and compile workflows", "gateway.features.workflows.command")],
)
