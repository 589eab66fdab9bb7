"""`warmroute record`: writes the traffic of running gateways into a file for `warmroute simulate`.

It asks GET /warmroute/recording of each gateway every second. A gateway stores rows only while a recorder asks, so nothing has
to be turned off at the end. The file has no text, no names and no hashes (`anonymous.py`).

Clocks: the rows of a gateway have times of its own clock. Its first answer gives the difference to ours, so that several
gateways are on one time line, with the precision of an answer's duration.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gateway import __version__
from gateway.commands.operate import DEFAULT_ADMIN, OperatorError, ask, read
from gateway.features.recording.command.anonymous import Anonymizer
from gateway.features.recording.command.rows import RecordedAnswer, TraceFleet, TracePage
from gateway.features.recording.command.trace_file import TraceFile, TraceFull
from router.simulation.recorded import FORMAT, MAX_COPIES, MAX_SECONDS, VERSION

JUMP_S: Final = 1.0  # difference that shows another clock, after a restart of the gateway
POLL_S: Final = 1.0
FLUSH_S: Final = 10.0  # at most this is lost if this process is killed
MAX_PAGES: Final = 64  # consecutive pages of a worker, before the other gateways are asked
MAX_RINGS: Final = 256  # rings per gateway; a restarted worker has a new one
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

DESCRIPTION: Final = (
    "Record the traffic of running gateways as a trace for `warmroute simulate`: lengths, times, cached tokens, and"
    " common beginnings of prompts; no text, no names, no hashes. Ends with Ctrl-C, or after --for. The exit status is 1 if a"
    " gateway cannot be reached, or the file cannot be completed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listener = "URLs of admin listeners, as for `warmroute status` (default: %(default)s)"
    parser.add_argument("--admin", metavar="URL[,URL...]", default=DEFAULT_ADMIN, help=listener)
    text = "the file; compressed if its name ends in .gz. It must not exist"
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help=text)
    parser.add_argument("--replace", action="store_true", help="overwrite the file if it exists")
    parser.add_argument(
        "--for", dest="seconds", metavar="TIME", type=_duration, help="30s, 10m, 24h, 7d, or seconds (default: until Ctrl-C)"
    )
    text = "share of the conversations, 0.0001 to 1; whole conversations, to preserve their reuse (default: %(default)s)"
    parser.add_argument("--sample", metavar="SHARE", type=_share, default=1.0, help=text)
    text = "stop when the file has this size in MB (default: %(default)s)"
    parser.add_argument("--max-mb", metavar="N", type=_megabytes, default=1024, help=text)
    text = "write the names of models, pools, replicas and tenants into the file (default: numbers only)"
    parser.add_argument("--names", action="store_true", help=text)


def _duration(text: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of at least 1s, such as 30s, 10m, 24h or 7d")
    return seconds


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 1 / MAX_COPIES <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from {1 / MAX_COPIES:g} to 1")
    return share


def _megabytes(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 1 << 20:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {1 << 20}")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _frame: _on_signal(number, stop))
    return Recorder(options, time.monotonic, stop).run()


def _on_signal(number: int, stop: threading.Event) -> None:
    """The first signal ends the recording. A second one, while a gateway does not answer, ends the process."""
    if stop.is_set():
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    stop.set()


@dataclass(slots=True)
class _Gateway:
    """A recorded gateway. offset: of our clock to its clock, in seconds. rings: cursors of its workers."""

    admin: str
    offset: float = math.nan  # unknown
    uncertain_s: float = 0.0  # of the offset
    rings: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_before: dict[str, int] = field(default_factory=dict)
    silent: bool = False


class Recorder:
    """Records one or more gateways. clock: monotonic seconds. stop: ends the recording."""

    def __init__(self, options: argparse.Namespace, clock: Callable[[], float], stop: threading.Event) -> None:
        self._options = options
        self._clock = clock
        self._stop = stop
        self._gateways = [_Gateway(admin.strip()) for admin in options.admin.split(",")]
        self._lines = Anonymizer(options.sample, random.Random())
        self._begun = clock()
        self._requests = 0
        self._lost = 0
        self._before = 0  # requests from before the recording

    def run(self) -> int:
        try:
            header = self._start()
        except OperatorError as error:
            return _failed(str(error))
        options = self._options
        try:
            trace = TraceFile(options.output, options.max_mb << 20, replace=options.replace)
        except FileExistsError:
            return _failed(f"{options.output} exists: choose another file, or use --replace")
        except OSError as error:
            return _failed(f"{options.output} cannot be written: {error.strerror or error}")
        ended = ""
        try:
            trace.add(header)
            trace.flush()
        except TraceFull as full:
            trace.abandon()
            return _failed(f"{full}; nothing is recorded")
        self.announce()
        try:
            self._record(trace)
            trace.flush()
        except TraceFull as full:
            ended = str(full)
        try:
            trace.close(self._last(trace, ended))
        except TraceFull as full:
            ended = ended or str(full)
            trace.dropped -= 1  # the last line, which is not a request
        self._report(trace, ended)
        return 1 if ended else 0

    def announce(self) -> None:
        """Reports that all later requests are recorded."""
        print(f"recording to {self._options.output}; Ctrl-C ends it", file=sys.stderr, flush=True)

    def _start(self) -> dict[str, Any]:
        """Starts the recording in all workers of each gateway, and returns the header. Raises OperatorError."""
        fleet, policy, version = dict[str, dict[str, Any]](), "", ""
        for gateway in self._gateways:
            answer = self._ask(gateway)
            for page in answer.pages:  # skips earlier rows, stored for another recorder
                gateway.rings[page.ring] = page.last + page.left
                gateway.skipped[page.ring] = gateway.skipped_before[page.ring] = page.skipped
            policy, version = answer.policy, answer.version
            rows = read(gateway.admin, ask(gateway.admin, "GET", "/warmroute/replicas"), TraceFleet).replicas
            fleet.update({row.name: self._replica(row) for row in rows if row.pool is not None})
        # Early enough for later requests to have times >= 0, in spite of the uncertain clock offsets.
        self._begun = self._clock() - max(gateway.uncertain_s for gateway in self._gateways)
        return {
            "format": FORMAT,
            "version": VERSION,
            "gateway": version,
            "recorder": __version__,
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "sample": self._options.sample,
            "policy": policy,
            "gateways": len(self._gateways),
            "fleet": list(fleet.values()),
        }

    def _replica(self, row: Any) -> dict[str, Any]:
        replica: dict[str, Any] = {
            "replica": self._lines.replicas.number(row.name),
            "pool": self._lines.pools.number(row.pool),
            "prefill_rate": row.prefill_tokens_per_second,
        }
        if row.kv_tokens:
            replica["kv_tokens"] = row.kv_tokens
        return replica

    def _ask(self, gateway: _Gateway) -> RecordedAnswer:
        """Raises OperatorError."""
        after = ",".join(f"{ring}:{last}" for ring, last in gateway.rings.items())
        sent = self._clock()
        raw = ask(gateway.admin, "GET", f"/warmroute/recording?sample={self._options.sample!r}&after={after}")
        answer = read(gateway.admin, raw, RecordedAnswer)
        took_s = self._clock() - sent
        offset, uncertain_s = sent + took_s / 2 - answer.now, took_s / 2
        if not abs(offset - gateway.offset) <= uncertain_s + gateway.uncertain_s + JUMP_S:  # the first answer, or a new clock
            gateway.offset, gateway.uncertain_s = offset, uncertain_s
        return answer

    def _record(self, trace: TraceFile) -> None:
        """Records until `stop`, or until the time is over. Raises TraceFull."""
        flushed, until = self._clock(), self._begun + (self._options.seconds or MAX_SECONDS)
        while True:
            last = self._stop.wait(min(POLL_S, max(0.0, until - self._clock()))) or self._clock() >= until
            for gateway in self._gateways:
                self._poll(gateway, trace)
            if self._clock() - flushed >= FLUSH_S:
                flushed = self._clock()
                trace.flush()
            if last:
                return

    def _poll(self, gateway: _Gateway, trace: TraceFile) -> None:
        """Fetches all available rows of a gateway."""
        for _ in range(MAX_PAGES):
            try:
                answer = self._ask(gateway)
            except OperatorError as error:
                if not gateway.silent:
                    print(f"warmroute: {error}; trying again", file=sys.stderr)
                gateway.silent = True
                return
            gateway.silent = False
            for page in answer.pages:
                self._take(gateway, page, trace)
            if not any(page.left for page in answer.pages):
                return

    def _take(self, gateway: _Gateway, page: TracePage, trace: TraceFile) -> None:
        known = gateway.rings.pop(page.ring, None)
        if known is not None:
            self._lost += max(0, page.first - known - 1)
        gateway.rings[page.ring] = page.last
        gateway.skipped[page.ring] = page.skipped
        if len(gateway.rings) > MAX_RINGS:
            del gateway.rings[next(iter(gateway.rings))]
        for row in page.rows:
            at = row.begun + gateway.offset - self._begun
            if at < 0:
                self._before += 1
            elif line := self._lines.line(row, at):
                self._requests += 1
                trace.add(line)

    # -- the end

    def _last(self, trace: TraceFile, ended: str) -> dict[str, Any]:
        last: dict[str, Any] = {
            "end": round(self._clock() - self._begun, 6),
            "lost": self._lost + trace.dropped,
            "skipped": sum(sum(each.skipped.values()) - sum(each.skipped_before.values()) for each in self._gateways),
            "forgotten_blocks": self._lines.blocks.forgotten,
        }
        if ended:
            last["stopped"] = ended
        if self._options.names:
            last["names"] = self._lines.names()
        return last

    def _report(self, trace: TraceFile, ended: str) -> None:
        written, conversations = self._requests - trace.dropped, self._lines.conversations.seen
        of = "" if trace.dropped else f" of {conversations} conversations"
        print(f"{written} requests{of} in {trace.path}, {trace.size / (1 << 20):.1f} MB", file=sys.stderr)
        if self._lost:
            text = "were lost, because this command fetched them too slowly: record with a smaller --sample"
            print(f"warmroute: {self._lost} requests {text}", file=sys.stderr)
        if ended:
            missing = f"; the last {trace.dropped} requests are missing" if trace.dropped else ""
            print(f"warmroute: {ended}{missing}; the file is valid up to there", file=sys.stderr)


def _failed(message: str) -> int:
    print(f"warmroute: {message}", file=sys.stderr)
    return 1
