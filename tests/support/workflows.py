"""A tiny runtime of workflows for tests: the values of the language, a clock that is a number, and answers by name of step.

It knows no events, retries or gate: it shows which calls are made, with which prompts, and what they compute at least.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.document import (
    Block,
    ConnectorCall,
    EachItem,
    LetValue,
    ModelCall,
    SwitchArms,
    WorkflowStep,
)
from gateway.features.workflows.language.inputs import read_inputs
from gateway.features.workflows.language.prefixes import PrefixUnion, PromptPiece
from gateway.features.workflows.language.prompts import messages_of, prompt_of
from gateway.features.workflows.language.results import CHAT, StepResult
from gateway.features.workflows.language.scheduling import DONE, ENDED, KILLED, RUNNING, SKIPPED, StepReadiness, readiness
from gateway.features.workflows.language.values import text_of
from gateway.features.workflows.language.workflow import Workflow

_TOKEN = re.compile(r"<\|[a-z]{1,12}\|>| ?\S{1,4}|\s")
_WORDS = [a + b + c for a in "bcdfglmnprst" for b in "aeiou" for c in "bdgklmnprst"]


def tokens(text: str) -> list[str]:
    """Tokens of the simulated replica."""
    return _TOKEN.findall(text)


def prose(count: int, seed: str) -> str:
    """A text of so many tokens."""
    chance = random.Random(seed)
    return " ".join(chance.choice(_WORDS) for _ in range(count))


def workflow_of(steps: Mapping[str, Any], **more: Any) -> Workflow:
    """A workflow with an input `messages`, and these steps."""
    inputs = {"messages": {"type": "messages"}}
    return compile_document({"workflow": 1, "name": "w", "inputs": inputs, "defaults": {"model": "m"}, "steps": steps} | more)


@dataclass
class TinyRun:
    """Runs a workflow. answers: texts by step. seconds: how long calls take, by step (default: 1). connectors: by name."""

    workflow: Workflow
    inputs: Mapping[str, Any]
    answers: Mapping[str, Any]
    connectors: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.peak = 0  # calls at once
        self.results: dict[str, StepResult] = {}
        self.prompts: dict[str, list[str]] = {}  # tokens, in the order of the starts
        self.written: dict[str, list[str]] = {}
        self.provisional: dict[str, bool] = {}  # of each output, when it came
        self.outputs: dict[str, Any] = {}
        self._scope: dict[str, Any] = {"inputs": read_inputs(self.workflow.inputs, dict(self.inputs))}
        self._due: list[tuple[float, int, str]] = []
        self._entered: dict[str, tuple[WorkflowStep, Mapping[str, Any], str]] = {}  # by copy: step, variables, suffix
        self._decided: set[str] = set()
        self._enter(self.workflow.steps, {}, "")

    def run(self) -> TinyRun:
        self._turn()
        while self._due:
            self._due.sort()
            self.now, _, copy = self._due.pop(0)
            if self.results[copy].status == RUNNING:
                self._answered(copy)
            self._turn()
        assert all(each.status in ENDED for each in self.results.values()), self.results
        return self

    def least_tokens(self, model_of: Mapping[str, str], union: PrefixUnion) -> int:
        for copy, prompt in self.prompts.items():
            model = model_of[copy.partition("[")[0]]
            union.add(model, pieces(prompt), pieces(self.written.get(copy, [])[:-1]))
        return union.least_tokens

    def _enter(self, block: Block, variables: Mapping[str, Any], suffix: str) -> None:
        for name, step in block.items():
            self._entered[name + suffix] = step, variables, suffix
            self.results[name + suffix] = StepResult()

    def _copy(self, name: str, suffix: str) -> str:
        return name + suffix if name + suffix in self.results else name

    def scope(self, copy: str) -> dict[str, Any]:
        _, variables, suffix = self._entered[copy]
        names = {
            name: self.results[self._copy(name, suffix)]
            for name in self.workflow.graph.steps
            if self._copy(name, suffix) in self.results
        }
        return {**self._scope, **names, **variables}

    def _turn(self) -> None:
        while moved := [copy for copy in list(self._entered) if self._moved(copy)]:
            assert moved

    def _moved(self, copy: str) -> bool:
        step, _, suffix = self._entered[copy]
        if self.results[copy].status == "pending":
            ready = readiness(step, self.workflow.graph, lambda name: self.results[self._copy(name, suffix)].status)
            if ready is StepReadiness.WAITS:
                return False
            if ready is StepReadiness.UNREACHABLE or (step.condition and not step.condition.fill(self.scope(copy))):
                self.results[copy] = StepResult(SKIPPED)
            else:
                self.results[copy] = StepResult(RUNNING)
                self._start(copy, step)
            return True
        return self.results[copy].status == RUNNING and bool(step.blocks) and self._ended(copy, step)

    def _start(self, copy: str, step: WorkflowStep) -> None:
        scope, suffix = self.scope(copy), self._entered[copy][2]
        match step.work:
            case LetValue(value=value):
                found = value.fill(scope)
                self._done(copy, StepResult(DONE, value=found, text=text_of(found)))
            case ModelCall() as call:
                if call.kind == CHAT:
                    self.prompts[copy] = [each for message in messages_of(call, scope) for each in _message(message)] + [
                        "<|assistant|>",
                        "\n",
                    ]
                else:
                    self.prompts[copy] = tokens(prompt_of(call, scope))
                self._called(copy, step)
            case ConnectorCall():
                self._called(copy, step)
            case SwitchArms(arms=arms):
                taken = next((arm for arm in arms if arm.when is None or arm.when.fill(scope)), None)
                self._decided.add(copy)
                self._scope[f"#{copy}"] = taken
                for name, value in (taken.emit if taken else {}).items():
                    self.outputs[name] = value.fill(scope)
                for name in taken.kills if taken else ():
                    self._kill(self._copy(name, suffix))
                self._enter(taken.steps if taken else {}, self._entered[copy][1], suffix)
            case EachItem() as each:
                for at, item in enumerate(each.items_for(scope)):
                    self._enter(each.steps, {**self._entered[copy][1], each.variable: item}, f"{suffix}[{at}]")

    def _called(self, copy: str, step: WorkflowStep) -> None:
        self._due.append((self.now + self.seconds.get(step.name, 1), len(self._due), copy))
        self.peak = max(self.peak, sum(self.results[each].status == RUNNING for _, _, each in self._due))

    def _answered(self, copy: str) -> None:
        step, _, _ = self._entered[copy]
        if isinstance(step.work, ConnectorCall):
            self._done(copy, StepResult(DONE, value=self.connectors[step.work.use]))
            return
        assert isinstance(step.work, ModelCall)
        text = self.answers[step.name]
        text = (" " if step.work.kind != CHAT else "") + prose(text, copy) if isinstance(text, int) else text
        self.written[copy] = tokens(text)
        value = step.work.value_of(text)
        message = {"role": "assistant", "content": text}
        if step.work.kind == CHAT:
            messages = [*messages_of(step.work, self.scope(copy)), message]
            self._done(copy, StepResult(DONE, value=value, text=text, message=message, messages=messages))
        else:
            self._done(copy, StepResult(DONE, value=value, text=text, prompt=prompt_of(step.work, self.scope(copy))))

    def _ended(self, copy: str, step: WorkflowStep) -> bool:
        suffix = self._entered[copy][2]
        if any(self.results[each].status not in ENDED for each in self._inner(step, suffix)):
            return False
        if isinstance(step.work, EachItem):
            count = len(step.work.items_for(self.scope(copy)))
            scopes = [self._item_scope(copy, at) for at in range(count)]
            values = [step.work.value.fill(scope) for scope in scopes]
            self._done(copy, StepResult(DONE, value=values, values=values))
            return True
        arm = self._scope[f"#{copy}"]
        waits = self.workflow.graph.steps_in(arm.value) if arm and arm.value else ()
        if any(self.results[self._copy(name, suffix)].status not in ENDED for name in waits):
            return False
        self._done(copy, StepResult(DONE, value=arm.value.fill(self.scope(copy)) if arm and arm.value else None))
        return True

    def _item_scope(self, copy: str, at: int) -> dict[str, Any]:
        suffix = f"{self._entered[copy][2]}[{at}]"
        return {
            **self.scope(copy),
            **{name.removesuffix(suffix): each for name, each in self.results.items() if name.endswith(suffix)},
        }

    def _inner(self, step: WorkflowStep, suffix: str) -> Iterator[str]:
        names = self.workflow.graph.contents[step.name]
        return (name for name, (each, _, own) in self._entered.items() if each.name in names and own.startswith(suffix))

    def _done(self, copy: str, result: StepResult) -> None:
        step, _, suffix = self._entered[copy]
        self.results[copy] = result
        if step.output:
            rule = step.output
            self.provisional[rule.name] = any(map(self._undecided, self.workflow.graph.killers[step.name]))
            self.outputs[rule.name] = rule.value.fill(self.scope(copy)) if rule.value else result.value
        for name in step.kills:
            self._kill(self._copy(name, suffix))
        self._decided.add(copy)

    def _undecided(self, name: str) -> bool:
        return name in self.results and name not in self._decided and self.results[name].status not in ENDED

    def _kill(self, copy: str) -> None:
        if self.results[copy].status not in ENDED:
            self.results[copy] = StepResult(KILLED)
        output = self._entered[copy][0].output
        if output:
            self.outputs.pop(output.name, None)


def pieces(each: Sequence[str]) -> list[PromptPiece]:
    return [PromptPiece(token, 1) for token in each]


def _message(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [f"<|{message['role']}|>", "\n", *tokens(content if isinstance(content, str) else json.dumps(content)), "\n"]
