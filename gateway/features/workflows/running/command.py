"""`warmroute workflow run`: runs a workflow at a gateway, and shows its events as they come."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gateway.commands.operate import CLIENT_KEY, CLIENTS, DEFAULT_URL, OperatorError, ask, failed, shown, stream, whole
from gateway.features.workflows.files import fault_lines, workflow_in
from gateway.features.workflows.language.faults import DocumentError
from gateway.features.workflows.language.inputs import MESSAGES

_PATH: Final = "/v1/workflows"
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".py")
_ERROR: Final = "error"


class InputError(ValueError):
    """An input cannot be read. The message says why."""


def add_run(actions: Any) -> None:
    """Add `run` to the actions of the command."""
    text = "Run a workflow at a gateway and show its events as they come. Ctrl-C cancels it. Exit status: 0 if it is completed;"
    text += " else 1, also if it has no output because its steps have failed."
    run = actions.add_parser("run", help="run a workflow at a gateway", description=text)
    run.add_argument("workflow", metavar="FILE|NAME", help="a document (.yaml, .json), a program (.py), or a name of `list`")
    given = "an input; @FILE: the JSON, or else the text, of a file. A text for messages is a message of the user"
    run.add_argument("--input", metavar="NAME=VALUE", action="append", default=[], help=given)
    where = f"the gateway, as clients reach it (default: %(default)s). If it asks for a key, set {CLIENT_KEY} to yours"
    run.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=where)
    run.add_argument("--json", action="store_true", help="print the events as JSON, a line each")
    run.set_defaults(act=_run)


def _run(options: argparse.Namespace) -> int:
    given: str = options.workflow
    try:
        document: Any = given
        if given.endswith(_SUFFIXES):
            workflow = workflow_in(Path(given))
            document, types = workflow.source, {name: each.type for name, each in workflow.inputs.items()}
        else:
            path = f"{_PATH}/{quote(given, safe='@')}"
            found = whole(options.url, ask(options.url, "GET", path, listener=CLIENTS), CLIENTS)
            types = {name: each["type"] for name, each in found["inputs"].items()}
        body = {"workflow": document, "inputs": inputs_of(options.input, types), "stream": True}
        with closing(stream(options.url, f"{_PATH}/runs", body)) as lines:
            return _show(events_of(lines), as_json=options.json)
    except DocumentError as error:
        print(fault_lines(Path(given), error.faults), file=sys.stderr)
        return 2
    except InputError as error:
        print(f"warmroute: {shown(str(error))}", file=sys.stderr)
        return 2
    except OperatorError as error:
        return failed(error)


def inputs_of(given: Iterable[str], types: Mapping[str, str]) -> dict[str, Any]:
    """The inputs of `NAME=VALUE`. types: of the declared inputs; the gateway refuses others. Raises InputError."""
    found = dict[str, Any]()
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise InputError(f"--input {each[:60]}: NAME=VALUE is expected")
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text("utf-8")
            except (OSError, ValueError) as error:
                raise InputError(f"--input {name}: {text[1:]} cannot be read: {error}") from None
        found[name] = _value(text, types.get(name, ""))
    return found


def _value(text: str, kind: str) -> Any:
    """JSON, except for texts."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return [{"role": "user", "content": text}] if kind == MESSAGES else text


def events_of(lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and data of each event. Raises OperatorError."""
    kind = ""
    for line in lines:
        name, _, value = line.decode("utf-8", "replace").rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            try:
                yield kind, json.loads(value)
            except ValueError:
                raise OperatorError("an event of the run is no JSON") from None


def _show(events: Iterable[tuple[str, dict[str, Any]]], *, as_json: bool) -> int:
    """Prints the events. Returns the exit status."""
    view, last, skipped = RunView(time.monotonic), "", False
    outputs: Any = None
    for kind, data in events:
        last, outputs = kind, data.get("outputs")
        skipped |= kind == "step.skipped" and "error" in data
        if as_json:
            print(json.dumps({"event": kind, **data}), flush=True)
        else:
            for line in view.lines(kind, data):
                print(shown(line), flush=True)
    if last == "run.completed" and skipped and not outputs:
        print("warmroute: the run has no output: its steps were skipped after errors", file=sys.stderr)
        return 1
    if last in ("run.completed", "run.failed", "run.incomplete", "run.cancelled", _ERROR):
        return int(last != "run.completed")
    raise OperatorError("the events of the run broke off")


class RunView:
    """The lines for a terminal: events with the seconds since the first one, and outputs with their texts as they come."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self._texts: dict[str, str] = {}  # of outputs that are streamed: without their complete lines
        self._streamed = set[str]()

    def lines(self, kind: str, data: Mapping[str, Any]) -> Iterator[str]:
        subject, _, what = kind.partition(".")
        if kind == "output.delta":
            yield from self._pieces(data["name"], data["text"])
        elif subject == "output":
            yield from self._output(what, data)
        elif subject == "step":
            yield self._at(f"{data['step']}: {what}{_details(what, data)}")
        elif kind == "run.created":
            bounds = data["bounds"]
            yield self._at(f"{data['run']}: {bounds_text(bounds['calls'], bounds['widest'], bounds['output_tokens'])}")
        elif kind == _ERROR:
            yield self._at(f"error: {data['error']['code']}: {data['error']['message']}")
        elif subject == "run":
            yield from self._end(what, data)

    def _at(self, text: str) -> str:
        return f"{self._clock() - self._begun:7.2f} s  {text}"

    def _pieces(self, name: str, text: str) -> Iterator[str]:
        self._streamed.add(name)
        *complete, self._texts[name] = (self._texts.get(name, "") + text).split("\n")
        yield from (f"  {name} | {line}" for line in complete)

    def _output(self, what: str, data: Mapping[str, Any]) -> Iterator[str]:
        name = data["name"]
        if what == "done":
            if name in self._streamed:
                yield f"  {name} | {self._texts.pop(name, '')}"
            else:
                value = data["value"]
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield from (f"  {name} | {line}" for line in text.split("\n"))
            if data["provisional"]:
                yield self._at(f"{name}: provisional")
        elif what != "snapshot":
            if what == "reset":
                self._texts.pop(name, None)
                self._streamed.discard(name)
            yield self._at(f"{name}: {what}")

    def _end(self, status: str, data: Mapping[str, Any]) -> Iterator[str]:
        error, usage = data.get("error"), data["usage"]
        reason = f": {error['code']}: {error['message']}" if error else ""
        reason = reason or "".join(f": {each}" for each in data.get("incomplete_details", {}).values())
        yield self._at(f"{status}{reason}")
        computed = f"{counted(usage['computed_tokens'], 'prompt token')} computed (least {usage['least_tokens']:,})"
        wasted = f", {usage['wasted_tokens']:,} of them wasted" if usage["wasted_tokens"] else ""
        yield (
            f"{counted(usage['calls'], 'call')}, {counted(usage['prompt_tokens'], 'prompt token')}, {computed},"
            f" {counted(usage['completion_tokens'], 'completion token')}{wasted}, {usage['cost_usd']:.6f} USD"
        )


def bounds_text(calls: int, widest: int, output_tokens: int) -> str:
    """The bounds of a run in words."""
    return f"at most {counted(calls, 'call')}, {widest:,} at once, {counted(output_tokens, 'output token')}"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _details(what: str, data: Mapping[str, Any]) -> str:
    error = data.get("error")
    failure = f": {error['code']}: {error['message']}" if error else ""
    if what == "done" and (usage := data.get("usage")):
        prompt = f"{counted(usage['prompt_tokens'], 'prompt token')}, {usage['cached_tokens']:,} cached"
        return f", {prompt}, {usage['completion_tokens']:,} in the answer"
    if what == "killed":
        return f" by {data['by']}" if data.get("by") else ""
    if what == "skipped":
        return failure or f": {data['reason']}"
    if failure:
        return failure
    return f": arm {data['arm']}" if what == "decided" else ""
