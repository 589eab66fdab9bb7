"""A run that is stored step by step: the interface of its journal, and the records with which another gateway goes on.

The outcome of a step is durable before the steps that need it start. So a gateway that goes on with the run has the outcome of
every step whose dependents may have begun, and calls no recorded step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from gateway.features.workflows.running.messages import CallUsage


class RecordedStep(NamedTuple):
    """The outcome of a step. name: of its copy. outcome: a ModelAnswer, a final StepFailure, or the value of a connector.
    usage: of its last attempt; None: of a connector.
    """

    name: str
    outcome: Any
    usage: CallUsage | None = None


class RunProgress(NamedTuple):
    """number: of the next event. receipt: the usage so far."""

    number: int
    receipt: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The state of a run whose gateway has stopped.

    number: of its next event. created_at: Unix seconds. steps: in the order of their records. called: connectors that were
    called, perhaps, and have no record. position: of the next record. cancelled: its client has asked for the end.
    """

    number: int
    created_at: float
    steps: Sequence[RecordedStep] = ()
    called: frozenset[str] = frozenset()
    position: int = 0
    receipt: Mapping[str, Any] = field(default_factory=dict)
    cancelled: bool = False


class RunJournal(Protocol):
    """Stores a run. Each method returns when the change is durable. While the store does not answer, it waits; if another
    gateway has the run, it never returns. resumed: None: the run begins here.
    """

    resumed: ResumedRun | None

    async def call(self, name: str) -> None:
        """A connector is about to be called that may be called once only. Raises GatewayError if the store is full."""

    async def record(self, step: RecordedStep, progress: RunProgress) -> None:
        """A step has its outcome. Raises GatewayError if the store is full."""

    async def end(self, status: str, run: Mapping[str, Any], number: int) -> None:
        """The run has ended. run: as JSON. number: of its last event."""
