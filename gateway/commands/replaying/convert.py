"""`warmroute convert`: public traces of coding agents, in their published form, as lines for `warmroute simulate`.

The published files have sessions, a JSON object each, whose requests list the ids of all their blocks (`hash_ids`), megabytes
for a long one. A converted request has the length of the common beginning with the previous list (`keep`), and the runs that it
adds (`new`). Everything else is copied. A sub-agent (an entry with `requests`) begins with an empty list.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from gateway.commands.replaying.trace_lines import MAX_LINE_BYTES, trace_lines
from router.simulation.workloads import TraceError, agents

MAX_FILE_BYTES: Final = 1 << 30
MAX_DEPTH: Final = 20  # of sub-agents in sub-agents
MAX_ID: Final = 1 << 53

DESCRIPTION: Final = (
    "Convert published traces of coding agents (a session is a JSON object whose requests have `hash_ids`, as in"
    " callanjfox/kv-cache-tester) into one file for `warmroute simulate`."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "JSON files with one session each, files with one a line (either may be gzipped), or folders of *.json"
    parser.add_argument("traces", metavar="TRACE", nargs="+", type=Path, help=text)
    text = "the file to write; compressed if it ends in .gz. It must not exist"
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help=text)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    path: Path = options.output
    sessions = requests = 0
    try:
        raw = path.open("xb")
        try:
            with raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw as out:
                for session in _converted(options.traces):
                    out.write(json.dumps(session, separators=(",", ":")).encode() + b"\n")
                    sessions, requests = sessions + 1, requests + _count(session)
        except BaseException:  # an incomplete file would look complete, and block the next attempt
            path.unlink()
            raise
    except FileExistsError:
        return _failed(f"{path} exists already: name another file")
    except OSError as error:
        return _failed(f"{error.filename or path}: {error.strerror or error}")
    except TraceError as error:
        return _failed(str(error))
    print(f"{sessions} sessions with {requests} requests in {path}", file=sys.stderr)
    return 0


def _converted(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"{path}: no *.json in this folder")
        for file in files:
            try:
                row = None
                for row in _objects(file):
                    yield session_lines(row)
                if row is None:
                    raise TraceError("it has no session")
            except TraceError as error:
                raise TraceError(f"{file}: {error}") from error


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file: one JSON object over several lines, or one a line."""
    try:
        with path.open("rb") as raw:
            pretty = raw.readline(MAX_LINE_BYTES).strip() == b"{"
        if not pretty:
            yield from trace_lines(path, max_line=MAX_FILE_BYTES)
            return
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TraceError(f"it has more than {MAX_FILE_BYTES} bytes")
        row = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(str(error) if isinstance(error, TraceError) else f"it is not JSON: {error}") from error
    yield row


def session_lines(row: dict[str, Any]) -> dict[str, Any]:
    """A published session in the form for `simulate`. Raises TraceError."""
    if not isinstance(row.get("requests"), list):
        raise TraceError("'requests', a list, is expected: a session of a coding agent")
    session = {**row, "requests": _requests(row["requests"], 1)}
    for _ in agents([session], sys.maxsize):  # checks that `simulate` can read it
        pass
    return session


def _requests(requests: list[Any], depth: int) -> list[dict[str, Any]]:
    if depth > MAX_DEPTH:
        raise TraceError(f"sub-agents are nested more than {MAX_DEPTH} deep")
    before: list[int] = []
    made = list[dict[str, Any]]()
    for number, request in enumerate(requests):
        if not isinstance(request, dict):
            raise TraceError(f"request {number} is not an object")
        if isinstance(request.get("requests"), list):
            made.append({**request, "requests": _requests(request["requests"], depth + 1)})
            continue
        if "keep" in request and "hash_ids" not in request:
            raise TraceError("it is in the form for `warmroute simulate` already")
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < MAX_ID for each in ids):
            raise TraceError(f"'hash_ids' of request {number} is not a list of whole numbers from 0 to {MAX_ID}")
        keep = next((place for place, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new), None)
        keep = min(len(before), len(ids)) if keep is None else keep
        copied = {name: value for name, value in request.items() if name != "hash_ids"}
        made.append({**copied, "keep": keep, "new": _runs(ids[keep:])})
        before = ids
    return made


def _runs(ids: list[int]) -> list[list[int]]:
    """[first, count] of each run of consecutive ids."""
    runs = list[list[int]]()
    for each in ids:
        if runs and each == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    return runs


def _count(session: dict[str, Any]) -> int:
    return sum(_count(each) if "requests" in each else 1 for each in session["requests"])


def _failed(message: str) -> int:
    print(f"warmroute: {message}", file=sys.stderr)
    return 2
