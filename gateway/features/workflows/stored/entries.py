"""Entries of stored workflows in lists, and the changes of a new version that callers may not expect. Pure."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.features.workflows.directory import TENANT, NamedWorkflow
from gateway.features.workflows.language.workflow import Workflow

INPUT_ADDED: Final = "input_added_required"
OUTPUT_REMOVED: Final = "output_removed"


def entry_of(workflow: Workflow) -> bytes:
    """The entry of a document."""
    return orjson.dumps({"listed": NamedWorkflow(workflow, TENANT).as_json(), "outputs": sorted(output_names(workflow))})


def listed(entry: bytes, version: int) -> dict[str, Any]:
    """An item of GET /v1/workflows."""
    shown: dict[str, Any] = orjson.loads(entry)["listed"]
    return shown | {"version": version}


def output_names(workflow: Workflow) -> set[str]:
    """Names of outputs: in events of a run, and in its result."""
    return {*(workflow.outputs or ()), *(name for step in workflow.graph.steps.values() for name in step.output_names)}


def change_warnings(before: bytes, after: bytes) -> list[dict[str, str]]:
    """The changes that callers of the version before may not expect. before: its entry; b"": there is none."""
    if not before:
        return []
    old, new = orjson.loads(before), orjson.loads(after)
    inputs = old["listed"]["inputs"]
    warnings = [
        _warning(INPUT_ADDED, f"inputs.{name}", "callers of the version before do not send this input, which is required")
        for name, each in new["listed"]["inputs"].items()
        if each["required"] and not inputs.get(name, {}).get("required")
    ]
    text = "the version before had this output"
    warnings += [_warning(OUTPUT_REMOVED, name, text) for name in old["outputs"] if name not in new["outputs"]]
    return warnings


def _warning(code: str, path: str, text: str) -> dict[str, str]:
    return {"code": code, "path": path, "text": text}
