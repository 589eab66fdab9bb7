"""`warmroute workflow`: checks documents, compiles programs to documents; stores, lists and runs workflows at a gateway."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.commands.streams import escaped
from gateway.features.table import read
from gateway.features.workflows.files import fault_lines, workflow_in
from gateway.features.workflows.language.faults import DocumentError, DocumentFault
from gateway.features.workflows.language.plan import RunAllowance, WorkflowPlan, plan_of
from gateway.features.workflows.language.reading import plain_scalar
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.running.command import add_run, bounds_text, counted
from gateway.features.workflows.section import WORKFLOWS
from gateway.features.workflows.stored.command import add_actions

DESCRIPTION: Final = (
    "Check workflows (YAML, JSON, or a program in Python) and show their plans, compile a program to its document, or store,"
    " list and run workflows at a gateway. All errors of a file are listed at once, with line and path; the exit status is"
    " then 2."
)
_PIECE_CHARS: Final = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")
    check = actions.add_parser("check", help="show all errors, or the plan", description="Show all errors, or the plan.")
    check.add_argument("files", metavar="FILE", type=Path, nargs="+", help="a document (.yaml, .json) or a program (.py)")
    text = "configuration with the bounds of a run (`workflows`; default: $WARMROUTE_CONFIG, else the defaults)"
    check.add_argument("--config", metavar="FILE", type=Path, help=text)
    check.set_defaults(act=_check, parser=check)
    compiling = actions.add_parser("compile", help="print the document of a program", description="Print a program's document.")
    compiling.add_argument("file", metavar="FILE", type=Path, help="a program (.py)")
    compiling.set_defaults(act=_compile, parser=compiling)
    for action, what in ((check, "print a JSON array, an item for each file"), (compiling, "print the document as JSON")):
        action.add_argument("--json", action="store_true", help=what)
    add_actions(actions)
    add_run(actions)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    status: int = options.act(options)
    return status


@dataclass(frozen=True, slots=True)
class _CheckedFile:
    """The outcome of one file. workflow, plan: None if there are faults."""

    path: Path
    faults: Sequence[DocumentFault] = ()
    workflow: Workflow | None = None
    plan: WorkflowPlan | None = None


def _check(options: argparse.Namespace) -> int:
    path = options.config or (Path(found) if (found := os.environ.get("WARMROUTE_CONFIG")) else None)
    bounds = WORKFLOWS.of(read(path, {}).config) if path else WORKFLOWS.default
    allowance = RunAllowance(bounds.max_calls, bounds.max_output_tokens, bounds.max_tokens, bounds.max_s)
    checked = [_checked(file, allowance) for file in options.files]
    if options.json:
        print(json.dumps([_as_json(each) for each in checked], indent=2))
    else:
        for each in checked:
            if each.faults:
                print(fault_lines(each.path, each.faults), file=sys.stderr)
            for line in _report(each):
                print(escaped(line))
    return 2 if any(each.faults for each in checked) else 0


def _compile(options: argparse.Namespace) -> int:
    try:
        source = workflow_in(options.file).source
    except DocumentError as error:
        print(fault_lines(options.file, error.faults), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(source, indent=2))
    else:
        print(yaml.dump(source, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=120), end="")
    return 0


class _PlainDumper(yaml.SafeDumper):
    """Writes a value that occurs twice in full: documents have no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quotes texts that `read_yaml` would read as another value, such as 1e3."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain_scalar(data) == data else "'")


_PlainDumper.add_representer(str, _PlainDumper.represent_str)


def _checked(path: Path, allowance: RunAllowance) -> _CheckedFile:
    try:
        workflow = workflow_in(path)
        return _CheckedFile(path, (), workflow, plan_of(workflow, allowance))
    except DocumentError as error:
        return _CheckedFile(path, sorted(error.faults, key=lambda fault: fault.line))


def _report(checked: _CheckedFile) -> Iterator[str]:
    plan, workflow = checked.plan, checked.workflow
    if plan is None or workflow is None:
        return
    bounds = bounds_text(plan.calls, plan.widest, plan.output_tokens)
    yield f"{checked.path}: good: {workflow.name}, {counted(len(workflow.graph.steps), 'step')}, {bounds}"
    for prefix in plan.prefixes:
        pieces = " + ".join(each if len(each) <= _PIECE_CHARS else f"{each[:_PIECE_CHARS]}..." for each in prefix.pieces)
        yield f"  shared by {prefix.calls} calls ({', '.join(prefix.steps)}; {prefix.model}): {pieces}"
    for warning in plan.warnings:
        yield f"  warning: {warning.path}: {warning.text}"


def _as_json(checked: _CheckedFile) -> dict[str, Any]:
    plan, workflow = checked.plan, checked.workflow
    return {
        "file": str(checked.path),
        "valid": not checked.faults,
        "errors": [asdict(each) for each in checked.faults],
        "name": workflow.name if workflow else None,
        "plan": asdict(plan) if plan else None,
    }
