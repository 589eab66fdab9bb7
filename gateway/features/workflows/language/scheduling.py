"""The state of a step, and whether it may start.

pending ──► running ──► done            done: its value is there
   │           ├──────► failed          retries are over
   │           └──────► killed
   └──► skipped, killed                 its condition is false; a need was skipped, killed or failed
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from gateway.features.workflows.language.document import WorkflowStep
from gateway.features.workflows.language.graph import StepGraph

PENDING, RUNNING, DONE, FAILED, KILLED, SKIPPED = "pending", "running", "done", "failed", "killed", "skipped"
ENDED: Final = frozenset([DONE, FAILED, KILLED, SKIPPED])


class StepReadiness(Enum):
    """waits: a need has not ended. ready: it starts if its condition is true. unreachable: it is skipped for its needs."""

    WAITS = "waits"
    READY = "ready"
    UNREACHABLE = "unreachable"


def readiness(step: WorkflowStep, graph: StepGraph, status: Callable[[str], str]) -> StepReadiness:
    """status: of a step by its name in the document. O(needs)."""
    needed = [status(name) for name in graph.requires[step.name]]
    if any(each in ENDED and each != DONE for each in needed):
        return StepReadiness.UNREACHABLE
    if any(each != DONE for each in needed):
        return StepReadiness.WAITS
    alternatives = [status(name) for name in step.needs_any]
    if not alternatives or DONE in alternatives:
        return StepReadiness.READY
    return StepReadiness.UNREACHABLE if ENDED.issuperset(alternatives) else StepReadiness.WAITS


def copy_name(name: str, indices: tuple[int, ...]) -> str:
    """The name of a step's copy in events: `section[2]`; in an `each` within an `each`: `section[2][0]`."""
    return name + "".join(f"[{index}]" for index in indices)
