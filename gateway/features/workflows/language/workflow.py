"""A workflow: everything that a valid document says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.features.workflows.language.document import Block, InputDeclaration
from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.templates import ValueTemplate


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds that a document sets for its runs; None: that of the gateway."""

    calls: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Workflow:
    """A valid document. outputs: None: all that was yielded. primary: the output that is a chat answer's text, if known."""

    name: str
    description: str
    inputs: Mapping[str, InputDeclaration]
    steps: Block
    outputs: Mapping[str, ValueTemplate] | None
    primary: str | None
    limits: RunLimits
    graph: StepGraph = field(repr=False, compare=False)
    source: Mapping[str, Any] = field(repr=False, compare=False)
