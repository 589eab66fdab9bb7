"""`warmroute workflow put` and `list`: stored workflows of a running gateway."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from gateway.commands.operate import CLIENT_KEY, CLIENTS, DEFAULT_URL, OperatorError, ask, failed, shown, whole
from gateway.features.workflows.files import fault_lines, workflow_in
from gateway.features.workflows.language.faults import DocumentError

_PATH: Final = "/v1/workflows"
_DESCRIPTION_CHARS: Final = 60


def add_actions(actions: Any) -> None:
    """Add `put` and `list` to the actions of the command."""
    text = "Store a workflow as the latest version of its name. An equal document makes no version."
    put = actions.add_parser("put", help="store a workflow at a gateway", description=text)
    put.add_argument("file", metavar="FILE", type=Path, help="a document (.yaml, .json) or a program (.py)")
    put.set_defaults(act=_put)
    text = "List the workflows that the key may use: the operator's, and stored ones in their latest version."
    listing = actions.add_parser("list", help="list the workflows of a gateway", description=text)
    listing.set_defaults(act=_list)
    where = f"the gateway, as clients reach it (default: %(default)s). If it asks for a key, set {CLIENT_KEY} to yours"
    for action in (put, listing):
        action.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=where)
        action.add_argument("--json", action="store_true", help="print the answer of the gateway")


def _put(options: argparse.Namespace) -> int:
    try:
        workflow = workflow_in(options.file)
    except DocumentError as error:
        print(fault_lines(options.file, error.faults), file=sys.stderr)
        return 2
    try:
        answer = _asked(options.url, "PUT", f"{_PATH}/{workflow.name}", workflow.source)
    except OperatorError as error:
        return failed(error)
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    print(shown(f"{answer['name']}: version {answer['version']}"))
    for warning in answer["warnings"]:
        print(shown(f"  warning: {warning['path']}: {warning['code']}: {warning['text']}"))
    return 0


def _list(options: argparse.Namespace) -> int:
    try:
        found = _asked(options.url, "GET", _PATH)["data"]
    except OperatorError as error:
        return failed(error)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    from gateway.commands.tables import number, print_table, text

    columns = [text("workflow"), number("version"), text("source"), text("inputs"), text("description")]
    print_table(columns, [list(map(shown, _row(each))) for each in found])
    return 0


def _row(workflow: dict[str, Any]) -> list[str]:
    inputs = ", ".join(f"{name}{'' if each['required'] else '?'}" for name, each in workflow["inputs"].items())
    description = " ".join(workflow["description"].split())
    if len(description) > _DESCRIPTION_CHARS:
        description = f"{description[:_DESCRIPTION_CHARS]}..."
    version = workflow["version"]
    return [workflow["name"], "" if version is None else str(version), workflow["source"], inputs, description]


def _asked(url: str, method: str, path: str, body: Any = None) -> Any:
    """Raises OperatorError."""
    return whole(url, ask(url, method, path, body, listener=CLIENTS), CLIENTS)
