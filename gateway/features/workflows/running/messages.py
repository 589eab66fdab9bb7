"""Values between the scheduler of a run and its surroundings: calls to make, their outcomes, and events for the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gateway.features.workflows.language.document import WorkflowStep
from router import MAX_LEAD_S


class StepContext(NamedTuple):
    """Common to all requests of a run. fields: of their lines in the log. defined: the operator has defined the workflow, so
    that the caller need not have its models. notes: of the request for the run, if it has some.
    """

    fields: dict[str, str]
    defined: bool
    notes: object | None = None


class GatedEngine(NamedTuple):
    """The engines of a model whose calls wait for a call that computes their prefix.

    prefill_rate: tokens per second of the slowest, for the length of a wait; 0: it is unknown, or a wait may take longer than
    it saves. slots: a prefix is found when its request has ended, by one request at a time. most_s: of a wait. token_bytes: of
    a prompt, on average.
    """

    prefill_rate: float = 0.0
    slots: bool = False
    most_s: float = MAX_LEAD_S
    token_bytes: float = 4.0


class EngineTraits(NamedTuple):
    """Properties of the engines behind the models of a workflow.

    gated: by model; others have no gate. choosing: models whose engines take `structured_outputs: {choice}`.
    """

    gated: Mapping[str, GatedEngine] = MappingProxyType({})
    choosing: frozenset[str] = frozenset()


NO_TRAITS: Final = EngineTraits()


class StartCall(NamedTuple):
    """Send the request of a step. name: of its copy. body: of the request. attempt: from 1. delay_s: wait so long before.

    uncertain: a step that is undecided may kill it.
    """

    name: str
    step: WorkflowStep
    body: Mapping[str, Any]
    attempt: int = 1
    delay_s: float = 0.0
    uncertain: bool = False


class CancelCall(NamedTuple):
    """Cancel the request of a step at once. killed: by a step, which is no error."""

    name: str
    killed: bool


class RunEvent(NamedTuple):
    """An event for the client. kind: such as `step.done`. data: without `run` and `seq`."""

    kind: str
    data: Mapping[str, Any]


class SchedulerTurn(NamedTuple):
    """Calls to start and to cancel, and events. more: another turn is due at once. wake_at: another turn is due then, unless
    something happens before. work: units of about a nanosecond, as `WorkBudget` counts them.
    """

    calls: Sequence[StartCall | CancelCall]
    events: Sequence[RunEvent]
    more: bool
    wake_at: float | None = None
    work: int = 0


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A complete answer of a model. message: as a client of chat would append it. calls: of tools."""

    text: str
    message: Mapping[str, Any] = field(default_factory=dict)
    calls: Sequence[Any] = ()
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class CallUsage:
    """The tokens of one request, of an engine's report or estimated; also of a request that was cancelled.

    predicted_cached: tokens that were expected to be cached when the request was sent.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    replica: str = ""
    reported: bool = True
    predicted_cached: int = 0


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The failure of a step, or of an attempt. status: for the client of a chat API. repeat: another attempt may help.

    waits: a limit of the caller's own key, which passes: the attempt does not count. ends_run: also with `on_error`. cause: the
    code of the request's own error, or "".
    """

    code: str
    message: str
    status: int = 502
    repeat: bool = False
    waits: bool = False
    retry_after_s: float | None = None
    ends_run: bool = False
    cause: str = ""

    @property
    def reason(self) -> str:
        """One of a few words for metrics."""
        if self.code != "step_failed":
            return self.code
        if self.cause in ("incomplete_answer", "unreadable_answer"):
            return "broken_answer"
        return {408: "timeout", 429: "rate_limit", 504: "timeout"}.get(self.status, "server_error")

    def as_json(self, step: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {"code": self.code, "message": self.message}
        if step:
            found["step"] = step
        if self.cause:
            found["cause"] = {"status": self.status, "code": self.cause}
        return found
