"""`warmroute workflow`: checks documents and programs, and compiles programs to documents."""

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
from gateway.features.workflows.language.compiling import JSON, PYTHON, YAML, compile_text
from gateway.features.workflows.language.faults import DocumentError, DocumentFault, refused
from gateway.features.workflows.language.plan import RunAllowance, WorkflowPlan, plan_of
from gateway.features.workflows.language.reading import MAX_DOCUMENT_BYTES, plain_scalar
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.section import WORKFLOWS

DESCRIPTION: Final = (
    "Check workflows (YAML, JSON, or a program in Python) and show their plans, or compile a program to its document. Nothing"
    " is run. All errors are listed at once, with file, line and path; the exit status is then 2."
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
            _print_faults(each)
            for line in _report(each):
                print(escaped(line))
    return 2 if any(each.faults for each in checked) else 0


def _compile(options: argparse.Namespace) -> int:
    try:
        source = _workflow(options.file).source
    except DocumentError as error:
        _print_faults(_CheckedFile(options.file, error.faults))
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


def _workflow(path: Path) -> Workflow:
    """Raises DocumentError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1).decode()
    except OSError as error:
        raise refused("", f"the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise refused("", f"the file is not UTF-8: {error.reason} at byte {error.start:,}") from None
    return compile_text(text, {".py": PYTHON, ".json": JSON}.get(path.suffix, YAML))


def _checked(path: Path, allowance: RunAllowance) -> _CheckedFile:
    try:
        workflow = _workflow(path)
        return _CheckedFile(path, (), workflow, plan_of(workflow, allowance))
    except DocumentError as error:
        return _CheckedFile(path, sorted(error.faults, key=lambda fault: fault.line))


def _print_faults(checked: _CheckedFile) -> None:
    for fault in checked.faults:
        at = f"{checked.path}:{fault.line}" if fault.line else f"{checked.path}"
        print(escaped(f"warmroute: {at}: {fault}"), file=sys.stderr)


def _report(checked: _CheckedFile) -> Iterator[str]:
    plan, workflow = checked.plan, checked.workflow
    if plan is None or workflow is None:
        return
    bounds = f"at most {plan.calls:,} calls, {plan.widest:,} at once, {plan.output_tokens:,} output tokens"
    yield f"{checked.path}: good: {workflow.name}, {len(workflow.graph.steps)} steps, {bounds}"
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
