"""A run before it begins: the workflow with its inputs and bounds, and the surroundings of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.features.workflows.directory import INLINE, TENANT
from gateway.features.workflows.language.plan import WorkflowPlan
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.calls import ModelCalls
from gateway.features.workflows.running.messages import NO_TRAITS, EngineTraits
from gateway.features.workflows.running.run_turns import RunTurns


class ConnectorCaller(Protocol):
    """Calls connectors."""

    @property
    def repeatable(self) -> frozenset[str]:
        """Names of connectors that may be called again."""

    async def call(self, use: str, arguments: Any, key: str) -> Any:
        """The answer, or a StepFailure. key: of idempotency."""


@dataclass(frozen=True, slots=True)
class RunOrder:
    """The workflow to run, with its inputs and bounds.

    version: of a stored workflow; None: it has none. seconds, cost_usd: bounds; None: no bound. see_replicas: the client may
    know them. engines: of its models. primary: an output whose text the client gets as it comes.
    defined: by the operator, so that the caller need not have its models. notes: of the client's request, if it has some.
    """

    workflow: Workflow
    plan: WorkflowPlan
    inputs: Mapping[str, Any]
    max_tokens: int
    seconds: float
    cost_usd: float | None = None
    version: int | None = None
    see_replicas: bool = False
    engines: EngineTraits = NO_TRAITS
    primary: str = ""
    defined: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: object | None = None

    @property
    def label(self) -> str:
        """The name of the workflow in logs and the ledger: a document of a request may have any name."""
        name = self.workflow.name
        return name if self.defined or self.version is not None else f"{INLINE}:{name}"

    @property
    def counted_as(self) -> str:
        """The workflow in metrics: a name only if it is the operator's, because clients choose the others."""
        return self.workflow.name if self.defined else TENANT if self.version is not None else INLINE


@dataclass(frozen=True, slots=True)
class RunServices:
    """The surroundings of all runs of a process. clock: monotonic seconds. wall_clock: Unix seconds."""

    models: ModelCalls
    connectors: ConnectorCaller
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    turns: RunTurns = field(default_factory=RunTurns)
