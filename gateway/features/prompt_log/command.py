"""`warmroute log`: names of conversations, and where two of them differ. Offline."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.commands.streams import escaped
from gateway.config.parse import ConfigError
from gateway.features.prompt_log.difference import LogDifference, differences
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.naming.chain import EMPTY, chain_named, chain_of, frame_name, head_name
from gateway.features.prompt_log.naming.entries import Log
from gateway.features.prompt_log.naming.forms import FORMS, form_of, log_in

DESCRIPTION: Final = (
    "Compute the names of a conversation as the header Prompt-Log has them, or find the first difference between two"
    " conversations. A file has the body of a request, as JSON; - is the standard input. Nothing is sent."
)
_FORM: Final = "the API of the body (default: what it looks like)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")
    text = "Print the frame's name, the number of entries and the head."
    head = actions.add_parser("head", help="print the names of a body", description=text)
    head.add_argument("file", metavar="FILE", help="the body of a request; -: the standard input")
    head.add_argument("--every", action="store_true", help="print the head after each entry")
    head.set_defaults(act=_head)
    text = "Print the first difference. The exit status is 0 if there is none, 1 if there is one, 2 after an error."
    diff = actions.add_parser("diff", help="print the first difference", description=text)
    for name in ("one", "other"):
        diff.add_argument(name, metavar="FILE|HEAD", help="the body of a request, or a head (pl1_...)")
    diff.set_defaults(act=_diff)
    for action in (head, diff):
        action.add_argument("--form", choices=list(FORMS), help=_FORM)
        action.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    status: int = options.act(options)
    return status


def _head(options: argparse.Namespace) -> int:
    log = _log(options.file, options.form)
    try:
        heads = [head_name(chain) for chain in chain_of(log.entries)]
        names: dict[str, Any] = {"frame": frame_name(log.frame), "length": len(heads)}
    except NoNameError as error:
        raise _nameless(options.file, error) from None
    names["head"] = heads[-1] if heads else head_name(EMPTY)
    if options.every:
        names["heads"] = heads
    if options.json:
        print(json.dumps(names))
        return 0
    for name in ("frame", "length", "head"):
        print(f"{name:<7}{names[name]}")
    for number, each in enumerate(heads if options.every else (), 1):
        print(f"{number:>6} {each}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    one, other = (_head_or_log(each, options.form) for each in (options.one, options.other))
    try:
        return _compare(options, one, other)
    except NoNameError as error:
        raise _nameless("A file", error) from None


def _compare(options: argparse.Namespace, one: bytes | Log, other: bytes | Log) -> int:
    """Returns the exit status. Raises NoNameError."""
    if isinstance(one, Log) and isinstance(other, Log):
        found = differences(one, other)
        _print(options, found, [_line(each, one, other) for each in found])
        return 1 if found else 0
    if isinstance(one, bytes) and isinstance(other, bytes):
        lines = [] if one == other else ["the heads differ; a file is needed to find the entry"]
        _print(options, None if lines else [], lines)
        return 1 if lines else 0
    log, head = (one, other) if isinstance(one, Log) else (other, one)
    assert isinstance(log, Log)
    length = next((at for at, chain in enumerate([EMPTY, *chain_of(log.entries)]) if chain == head), -1)
    if length == len(log.entries):
        _print(options, [], [])
        return 0
    if length >= 0:
        line = f"the head names the first {length:,} of {len(log.entries):,} entries"
        _print(options, [LogDifference(length, "")], [line])
    else:
        _print(options, None, ["the head names no beginning of this conversation"])
    return 1


def _print(options: argparse.Namespace, found: list[LogDifference] | None, lines: list[str]) -> None:
    """found: None: there are differences at unknown places."""
    if options.json:
        places = None if found is None else [{"entry": each.entry, "path": each.path} for each in found]
        print(json.dumps({"equal": found == [], "differences": places}))
        return
    for line in lines or ["equal"]:
        print(escaped(line))


def _line(found: LogDifference, one: Log, other: Log) -> str:
    if found.entry < 0:
        return f"the frames differ at {found.path}"
    if not found.path:
        longer, shorter = sorted((len(one.entries), len(other.entries)), reverse=True)
        return f"one has {shorter:,} entries, the other {longer:,}; the first {shorter:,} are equal"
    return f"entry {found.entry + 1} differs at {found.path}"


def _head_or_log(text: str, form: str | None) -> bytes | Log:
    return chain_named(text) or _log(text, form)


def _log(file: str, form: str | None) -> Log:
    """Raises ConfigError."""
    try:
        body = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        return log_in(body, form or _form(body))
    except NoNameError as error:
        raise _nameless(file, error) from None


def _form(body: bytes) -> str:
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "chat"
    return form_of(found) if isinstance(found, dict) else "chat"


def _nameless(file: str, error: NoNameError) -> ConfigError:
    return ConfigError(f"{file} has no name: {error.reason}.")
