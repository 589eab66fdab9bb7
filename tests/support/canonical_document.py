"""The canonical form of a workflow's document, for comparisons.

Expressions are written in one way. Implied needs and default values are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.features.workflows.language.graph import StepGraph
from gateway.features.workflows.language.results import CHAT, EACH, SWITCH, TEXT
from gateway.features.workflows.language.templates import canonical_text, parse_text
from gateway.features.workflows.language.workflow import Workflow

_CONSTANTS: Final = ("choices", "output")  # their texts have no expressions
_DONE: Final = (CHAT, TEXT, SWITCH, EACH)


def canonical_document(workflow: Workflow) -> dict[str, Any]:
    """Equal for documents that mean the same. The description is left out; the order of steps stays."""
    source = {key: value for key, value in workflow.source.items() if key not in ("description", "steps", "inputs")}
    steps = _CanonicalSteps(workflow.graph, source.get("defaults", {})).block(workflow.source["steps"])
    filled = {key: value for key, value in source.items() if value != {}}
    return {**_texts(filled), "inputs": workflow.source.get("inputs", {}), "steps": steps}


class _CanonicalSteps:
    def __init__(self, graph: StepGraph, defaults: Mapping[str, Any]) -> None:
        self._graph, self._defaults = graph, defaults

    def block(self, block: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._step(name, step) for name, step in block.items()}

    def _step(self, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
        step = dict(source)
        needs = set(step.pop("needs", ())) - self._graph.implied[name]
        if needs:
            step["needs"] = sorted(needs)
        if isinstance(step.get("yield"), str):
            step["yield"] = {"as": step["yield"]}
        for kind in (CHAT, TEXT):
            if kind in step:
                fields = {key: each for key, each in step[kind].items() if self._defaults.get(key) != each}
                step[kind] = {key: each if key in _CONSTANTS else _texts(each) for key, each in fields.items()}
        if SWITCH in step:
            step[SWITCH] = [self._arm(arm) for arm in step[SWITCH]]
        if EACH in step:
            step[EACH] = self._arm(step[EACH])
        return {key: value if key in _DONE else _texts(value) for key, value in step.items()}

    def _arm(self, source: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.block(value) if key == "steps" else _texts(value) for key, value in source.items()}


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return canonical_text(parse_text(value))
    if isinstance(value, dict):
        return {key: _texts(each) for key, each in value.items()}
    return [_texts(each) for each in value] if isinstance(value, list) else value
