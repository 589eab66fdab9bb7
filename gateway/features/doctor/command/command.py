"""`warmroute doctor FILE`: examines a file of requests, or a running gateway, and prints the report."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

from gateway.commands.operate import ANSWER_S, DEFAULT_ADMIN, KEY, OperatorError, ask, whole
from gateway.commands.streams import escaped
from gateway.features.doctor.command.printing import Report, is_report, print_report
from gateway.features.doctor.command.reading import FileError, Reader
from gateway.features.doctor.examination import Examination
from gateway.features.doctor.examiner import EXAMINE_S
from gateway.features.doctor.prices import DoctorPrices
from gateway.features.doctor.report import report
from gateway.features.doctor.watch import WATCH_S

LIVE_S: Final = EXAMINE_S + ANSWER_S  # time limit of an answer: the examination and the usual time
MAX_SECONDS: Final = WATCH_S / 2  # shorter than the watch, which must last until the second question
DESCRIPTION: Final = (
    "Find where the prefixes of a stream of requests break, and why: a time, an id or a random token near the head, tools in"
    " another order, a changed system prompt, a salt, rewritten history, and others; the cost, and a remedy. The exit status is"
    " 0 without findings, 1 with findings, 2 if the requests cannot be read."
)


_SECONDS: Final = "--live: seconds to watch before the report; 0: only requests since the last question (default: 60)"
_ADMIN: Final = f"--live: the gateway's admin listener (default: %(default)s). With an admin key, set {KEY} to it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "JSON lines, optionally gzipped: requests with path and body, bodies, or traces (docs/doctor.md); -: standard input"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", metavar="FILE", type=Path, nargs="?", help=text)
    source.add_argument("--live", action="store_true", help="examine the requests of a running gateway (GET /warmroute/doctor)")
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="N", help=_SECONDS)
    parser.add_argument("--admin", metavar="URL", default=DEFAULT_ADMIN, help=_ADMIN)
    parser.add_argument("--text", action="store_true", help="show the texts at the first difference instead of digests")
    parser.add_argument("--session", metavar="NAME", help="only requests of this session")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, with every finding")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration with `prices`, for the cost of lost tokens")
    price = "USD per million uncached and cached prompt tokens, for all models"
    parser.add_argument("--price", metavar="UNCACHED,CACHED", type=_price, help=price)


def _price(text: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        uncached, cached = (float(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not two numbers such as 0.5,0.05") from None
    if not (0 <= cached < math.inf and 0 <= uncached < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r}: prices are 0 or more")
    return uncached, cached


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_SECONDS:g}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    return _live(options) if options.live else _file(options)


def _live(options: argparse.Namespace) -> int:
    file_options = [name for name in ("text", "session", "config", "price") if getattr(options, name)]
    if file_options:
        print(
            f"warmroute: --{file_options[0]} is for files; a gateway stores no texts, and has its own prices", file=sys.stderr
        )
        return 2
    try:
        raw = ask(options.admin, "GET", "/warmroute/doctor", answer_s=LIVE_S)
        if options.seconds:
            time.sleep(options.seconds)
            raw = ask(options.admin, "GET", "/warmroute/doctor", answer_s=LIVE_S)
        found = whole(options.admin, raw)
    except OperatorError as error:
        print(escaped(f"warmroute: {error}"), file=sys.stderr)
        return 2
    if not is_report(found):
        print(escaped(f"warmroute: {options.admin} is no admin listener of a gateway of this release"), file=sys.stderr)
        return 2
    show(found, as_json=options.json)
    return int(bool(found["causes"]))


def _file(options: argparse.Namespace) -> int:
    reader, examination = Reader(_prices(options), text=options.text, now=time.time()), Examination()
    try:
        for prompt in reader.read(options.file):
            if options.session is None or prompt.session == options.session:
                examination.add(prompt)
    except FileError as error:
        print(escaped(f"warmroute: {options.file}: {error}"), file=sys.stderr)
        return 2
    _print_problems(options, reader)
    if not examination.requests:
        missing = f"no request of the session {options.session!r}" if options.session else "no request"
        print(escaped(f"warmroute: {options.file}: {missing}"), file=sys.stderr)
        return 2
    found = report(examination, reader.notes)
    found["skipped_lines"] = reader.skipped
    show(found, as_json=options.json)
    return int(bool(found["causes"]))


def show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_report(cast(Report, found))


def _prices(options: argparse.Namespace) -> DoctorPrices:
    """Raises ConfigError."""
    if options.config is None:
        return DoctorPrices(fixed=options.price)
    from gateway.features.table import read

    return DoctorPrices(read(options.config, {}).config.prices, options.price)


def _print_problems(options: argparse.Namespace, reader: Reader) -> None:
    for problem in reader.problems:
        print(escaped(f"warmroute: {options.file}, {problem}"), file=sys.stderr)
    if more := reader.skipped - len(reader.problems):
        print(escaped(f"warmroute: {options.file}: {more} more lines cannot be parsed"), file=sys.stderr)
