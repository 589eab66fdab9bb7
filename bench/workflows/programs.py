"""Programs to run: documents with their scenarios, from a folder of `NAME.yaml` and `NAME.expected.yaml`.

A scenario has the sizes of inputs in tokens, and the answers of the models: texts, or numbers of tokens. Every run has inputs
of its own, so that it is cold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.inputs import MESSAGES
from gateway.features.workflows.language.workflow import Workflow

HISTORY: Final = 8192  # tokens of the scenarios' histories
_WORDS: Final = [a + b + c for a in "bcdfglmnprst" for b in "aeiou" for c in "bdgklmnprst"]
# The step of a request, by a piece of its last message: the first piece that is there.
PIECES: Final[Mapping[str, Mapping[str, str]]] = {
    "answer_critic_copilot": {"violate the policy": "critic", "ask next": "copilot", "": "answer"},
    "linear": {"Copilot:": "questions", "Critic:": "critic", "": "answer"},
    "linear_chat": {"ask next": "questions", "policy": "critic", "": "answer"},
    "speculative": {"Extract feature 1": "feature1", "Use this": "result2", "": "default"},
    "outline": {"section titles": "plan", "Write the section": "section", "Join and smooth": "polish"},
    "panel": {"Write the best answer": "judge", "": "candidate"},
    "paper_qa": {"": "answer"},
    "streamed_field": {"": "result"},
    "two_features": {"Extract feature 1": "feature1", "": "result"},
    "hedge": {"": "small"},
}


def prose(tokens: int, seed: str) -> str:
    """A text of so many tokens of the simulated replica."""
    chance = random.Random(seed)
    return " ".join(chance.choice(_WORDS) for _ in range(tokens))


@dataclass(frozen=True, slots=True)
class Program:
    """One scenario of a program. runs: that belong together, one after the other."""

    name: str
    scenario: str
    document: Mapping[str, Any]
    workflow: Workflow
    answers: Mapping[str, Any]
    sizes: Mapping[str, Any]
    runs: int = 1
    connectors: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.scenario}"

    @property
    def script(self) -> list[dict[str, str]]:
        """The script of the simulated replicas."""
        kind = " " if self.name == "linear" else ""
        lines = []
        for piece, step in PIECES[self.name].items():
            if step in self.answers:
                said = self.answers[step]
                lines.append({"contains": piece, "say": kind + prose(said, step) if isinstance(said, int) else said})
        return lines

    @property
    def models(self) -> list[str]:
        steps = self.document["steps"].values()
        own = {step[kind]["model"] for step in steps for kind in ("chat", "text") if "model" in step.get(kind, {})}
        return [self.document["defaults"]["model"], *sorted(own)]

    def inputs(self, seed: str, number: int, history: int) -> dict[str, Any]:
        """The inputs of a run. number: of the runs that belong together. history: tokens, in place of HISTORY."""
        found: dict[str, Any] = {}
        for name, size in self.sizes.items():
            own = size[number] if isinstance(size, list) and self.workflow.inputs[name].type != MESSAGES else size
            if isinstance(own, list):
                texts = [(role, prose(_scaled(tokens, history), f"{seed} {at}")) for at, (role, tokens) in enumerate(own)]
                found[name] = [{"role": role, "content": text} for role, text in texts]
            else:
                found[name] = prose(_scaled(own, history), f"{seed} {name} {number}") if isinstance(own, int) else own
        return found

    def answer_of(self, use: str, seed: str, history: int) -> dict[str, str]:
        """The answer of a connector."""
        return {name: prose(_scaled(size, history), f"{seed} {use}") for name, size in self.connectors[use].items()}


def _scaled(tokens: int, history: int) -> int:
    return max(1, tokens * history // HISTORY)


def _bounded(value: Any, most: int) -> Any:
    """A document whose members `max_tokens` are at most so large."""
    if isinstance(value, dict):
        return {key: min(each, most) if key == "max_tokens" else _bounded(each, most) for key, each in value.items()}
    return [_bounded(each, most) for each in value] if isinstance(value, list) else value


def programs(folder: Path, max_tokens: int) -> Iterator[Program]:
    """The scenarios of all programs of a folder; of those with timings only the first for each set of answers.

    max_tokens: of an answer, at most.
    """
    for path in sorted(folder.glob("*.expected.yaml")):
        name = path.name.removesuffix(".expected.yaml")
        document = _bounded(yaml.safe_load((folder / f"{name}.yaml").read_text("utf-8")), max_tokens)
        seen: list[Any] = []
        for each in yaml.safe_load(path.read_text("utf-8"))["scenarios"]:
            if each["answers"] not in seen:
                seen.append(each["answers"])
                connectors = each.get("connectors", {})
                rest = each["answers"], each["inputs"], each.get("runs", 1), connectors
                yield Program(name, each["name"], document, compile_document(document), *rest)


def without_speculation(document: Mapping[str, Any]) -> dict[str, Any]:
    """`speculative` in its sequential form: the feature first, then only what its branch needs."""
    steps = document["steps"]
    found, other = steps["final"]["switch"]
    arms = [{key: value for key, value in arm.items() if key != "kill"} for arm in (found, other)]
    arms[0]["steps"] = {"feature2": steps["feature2"], **found["steps"]}
    arms[1]["steps"] = {"default": steps["default"]}
    return {**document, "steps": {"feature1": steps["feature1"], "final": {**steps["final"], "switch": arms}}}
