"""The usage of a run while it runs: its receipt, the tokens that are in no result, and the limit of its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.features.workflows.language.document import ModelCall
from gateway.features.workflows.language.results import CHAT
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, StartCall, StepFailure
from gateway.features.workflows.running.outputs import RETRACTED
from gateway.features.workflows.running.receipt import Receipt, message_bytes
from gateway.features.workflows.running.scheduler import RunScheduler


class RunUsage:
    """most_usd: the limit; None: there is none."""

    def __init__(self, scheduler: RunScheduler, most_usd: float | None) -> None:
        self.receipt = Receipt()
        self._scheduler = scheduler
        self._most_usd = most_usd
        self._tokens: dict[str, int] = {}  # of answers of steps that are done
        self._committed: dict[str, float] = {}  # the worst price of each call that runs
        self._latest: dict[str, CallUsage] = {}

    @property
    def limited(self) -> bool:
        return self._most_usd is not None

    def affords(self, name: str, worst_usd: float) -> bool:
        """False if the worst price of the call could exceed the run's limit."""
        assert self._most_usd is not None
        if self.receipt.cost_usd + sum(self._committed.values()) + worst_usd > self._most_usd:
            return False
        self._committed[name] = worst_usd
        return True

    def count(self, call: StartCall, usage: CallUsage, outcome: ModelAnswer | StepFailure | None) -> None:
        """Counts the usage of an attempt. outcome: None: it was cancelled."""
        self._committed.pop(call.name, None)
        self._latest[call.name] = usage
        self.receipt.count(usage)
        self._scheduler.used(call.name, usage)
        if isinstance(outcome, ModelAnswer):
            self._tokens[call.name] = usage.completion_tokens
        else:
            self.receipt.wasted += usage.completion_tokens
        work = call.step.work
        if not isinstance(work, ModelCall) or not usage.prompt_tokens:
            return
        answer = outcome if isinstance(outcome, ModelAnswer) else None
        continued: list[bytes] = []
        if work.kind == CHAT:
            prompt = [message_bytes(each) for each in call.body["messages"]]
            if answer is not None:
                continued = [*prompt, message_bytes(answer.message)]
        else:
            prompt = [call.body["prompt"].encode("utf-8", "surrogatepass")]
            if answer is not None:
                continued = [prompt[0] + answer.text.encode("utf-8", "surrogatepass")]
        self.receipt.union.add(
            work.model, prompt, usage.prompt_tokens, continued, usage.completion_tokens, estimated=not usage.reported
        )

    def of(self, name: str) -> CallUsage | None:
        """The usage of the latest attempt of a step."""
        return self._latest.get(name)

    def as_json(self) -> Mapping[str, Any]:
        usage = self.receipt.as_json()
        retracted = {each.source.name for each in self._scheduler.board.outputs.values() if each.state == RETRACTED}
        usage["wasted_tokens"] += sum(self._tokens.get(name, 0) for name in retracted)
        return usage
