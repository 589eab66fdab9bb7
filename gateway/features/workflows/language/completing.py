"""Completes steps with values that a document leaves out: model, tools and extra of a step's source, the bound of an `each`.

The model, tools and extra are part of the prompt, so a step that continues a transcript takes them over unless it has its own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.features.workflows.language.document import Block, EachItem, InputDeclaration, ModelCall, SwitchArms, WorkflowStep
from gateway.features.workflows.language.expressions import INPUTS
from gateway.features.workflows.language.faults import UNBOUNDED, DocumentFaults
from gateway.features.workflows.language.steps import MAX_ITEMS


def completed(
    steps: Block, model: str, inputs: Mapping[str, InputDeclaration], faults: DocumentFaults
) -> dict[str, WorkflowStep]:
    """The same steps, complete. model: of `defaults`."""
    return _Completion(steps, model, inputs, faults).block(steps)


class _Completion:
    def __init__(self, steps: Block, model: str, inputs: Mapping[str, InputDeclaration], faults: DocumentFaults) -> None:
        self._steps = dict(all_steps(steps))
        self._model, self._inputs, self._faults = model, inputs, faults
        self._calls: dict[str, ModelCall] = {}

    def block(self, block: Block) -> dict[str, WorkflowStep]:
        return {name: replace(step, work=self._work(step)) for name, step in block.items()}

    def _work(self, step: WorkflowStep) -> Any:
        work = step.work
        if isinstance(work, ModelCall):
            made = self._call(step.name, work, ())
            if not made.model:
                self._faults.add(f"{step.path}.{work.kind}.model", "the model is missing; name it here or in defaults.model")
            return made
        if isinstance(work, SwitchArms):
            return replace(work, arms=tuple(replace(arm, steps=self.block(arm.steps)) for arm in work.arms))
        if isinstance(work, EachItem):
            return replace(work, steps=self.block(work.steps), bound=self._bound(work))
        return work

    def _call(self, name: str, work: ModelCall, chain: tuple[str, ...]) -> ModelCall:
        """The complete call. chain: steps that continue it; a circle among them is an error of the graph."""
        if name in self._calls:
            return self._calls[name]
        model, tools, extra = work.model, work.tools, work.extra
        source = self._steps.get(work.source or "")
        if source is not None and isinstance(source.work, ModelCall) and source.name not in (*chain, name):
            before = self._call(source.name, source.work, (*chain, name))
            model, tools, extra = model or before.model, tools or before.tools, extra or before.extra
        self._calls[name] = replace(work, model=model or self._model, tools=tools, extra=extra)
        return self._calls[name]

    def _bound(self, work: EachItem) -> int:
        """The greatest number of items."""
        bound = len(work.items.value) if isinstance(work.items.value, list) else None
        if work.items.expression is not None:
            bound = self._length(work.items.expression.tree)
        elif bound is None:
            return 0  # no list, which is an error of its own
        path = work.items.path
        if bound is None:
            text = "the greatest number of items is not known: write ${x[:5]}, or give the list's schema maxItems"
            self._faults.add(path, text, UNBOUNDED)
        elif bound > MAX_ITEMS:
            self._faults.add(path, f"it may have {bound} items; at most {MAX_ITEMS} are possible (${{x[:{MAX_ITEMS}]}})")
        return min(bound or 0, MAX_ITEMS)

    def _length(self, tree: ast.expr) -> int | None:
        """The greatest length of an expression's list; None: unknown."""
        if isinstance(tree, ast.List):
            return len(tree.elts)
        if isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Slice):
            end = tree.slice.upper
            whole = isinstance(end, ast.Constant) and isinstance(end.value, int) and not isinstance(end.value, bool)
            return int(end.value) if whole else self._length(tree.value)  # type: ignore[union-attr]
        if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name) and tree.value.id == INPUTS:
            declared = self._inputs.get(tree.attr)
            return declared.max_length if declared else None
        length = (self._schema(tree) or {}).get("maxItems")
        return length if isinstance(length, int) else None

    def _schema(self, tree: ast.expr) -> Mapping[str, Any] | None:
        """The schema of a step's value, or of a member of it."""
        if not isinstance(tree, ast.Attribute):
            return None
        if isinstance(tree.value, ast.Name):
            step = self._steps.get(tree.value.id)
            found = isinstance(step.work, ModelCall) and tree.attr == "value" if step else False
            constraint = step.work.constraint if step and isinstance(step.work, ModelCall) and found else None
            return constraint.schema if constraint else None
        inner: Mapping[str, Any] | None = (self._schema(tree.value) or {}).get("properties", {}).get(tree.attr)
        return inner


def all_steps(block: Block) -> list[tuple[str, WorkflowStep]]:
    """All steps with their names, an outer one before its inner ones, in the order of the document."""
    found: list[tuple[str, WorkflowStep]] = []
    for name, step in block.items():
        found.append((name, step))
        for inner in step.blocks:
            found += all_steps(inner)
    return found
