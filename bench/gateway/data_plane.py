"""Costs of the data plane beside its peers, in one run: the same mock replicas, the same load.

    python -m bench.gateway [--quick] [--only warmroute,sglang-router] [--before FOLDER] [--out bench/reports]

Writes gateway.md, gateway.json and, if matplotlib is there, gateway.png. The systems and how each is started: `systems.py`;
the replicas: `mock.py`; the load: `load.py`. Those that are not installed are left out (`scripts/peers.sh` installs
them). --before: another version, compiled (`hatch_build.py`), in the same run. Every system runs all the time, on one core, and
is idle while it is not its turn. They take turns, part by part, for some rounds; of CPU times the least of the rounds counts,
because other programs on the machine only add time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gateway.scores import Score, draw, report
from bench.gateway.systems import SYSTEMS, NotStarted, Running, System, another_build, mocks, started
from bench.measure.cpu import cores, peak_bytes, pinned, rss_bytes
from bench.measure.load import Closed, Open, command
from bench.measure.machine import REPORTS, versions
from bench.measure.machine import command as shell_command

INTERVAL_S = 0.01
STREAMS, CHUNKS = 100, 100  # concurrent; of each
TTFT_CHUNKS = 25
TTFT_RATE_LIMIT = 1000.0  # streams a second: what load and mocks do without being busy themselves
SHORT, LONG = 2000, 32_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured in each of the rounds. No request is sent after `seconds` of a part."""

    rounds: int = 5
    short: int = 10_000
    long: int = 5_000
    waves: int = 2
    seconds: float = 3.0
    ttft_seconds: float = 5.0


QUICK = Plan(rounds=1, short=4_000, long=2_000, waves=1, seconds=2.0, ttft_seconds=3.0)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one load brought. busy: share of a core that the system used; each: CPU us per request or chunk."""

    good: int
    errors: dict[str, int]
    rate: float
    busy: float
    each: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Streams a second; seconds of TTFT: the system's quantile less that of the replica itself."""

    rate: float
    added_p50: float
    added_p99: float
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One system in one round."""

    short: LoadResult
    long: LoadResult
    chunks: LoadResult
    wait: Wait

    @property
    def errors(self) -> dict[str, int]:
        return total([self.short.errors, self.long.errors, self.chunks.errors, self.wait.errors])


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """By reason."""
    return dict(sum(map(Counter, counts), Counter[str]()))


class Meter:
    """Sends load to a system, from a process of its own on the load's cores."""

    def __init__(self, plan: Plan, mock_port: int, load_cores: set[int]) -> None:
        self._plan = plan
        self._mock = mock_port
        self._cores = load_cores

    def short(self, system: Running) -> LoadResult:
        return self._closed(system, SHORT, self._plan.short)

    def long(self, system: Running) -> LoadResult:
        return self._closed(system, LONG, self._plan.long)

    def chunks(self, system: Running) -> LoadResult:
        requests, seconds = STREAMS * self._plan.waves, self._plan.seconds
        job = Closed(system.port, system.process.pid, SHORT, CHUNKS, STREAMS, requests, seconds, warm=10)
        found = self._run(job)
        return part(found, found["words"])

    def wait(self, system: Running, short: LoadResult, chunks: LoadResult) -> Wait:
        """At half of what it can do with as much of its core as it got."""
        half = 0.5e6 * short.busy / (short.each + TTFT_CHUNKS * chunks.each) if chunks.each else 0.0
        rate = min(TTFT_RATE_LIMIT, half) or 1.0
        # For a fair p99 of the replica itself there must be enough of them.
        job = Open(system.port, self._mock, rate, max(rate / 4, 50), self._plan.ttft_seconds, TTFT_CHUNKS)
        found = self._run(job)
        through, direct = found["through"], found["direct"]
        p50, p99 = (through.get(name, 0.0) - direct.get(name, 0.0) for name in ("first_p50", "first_p99"))
        return Wait(rate, p50, p99, total([through["errors"], direct["errors"]]))

    def _closed(self, system: Running, size: int, requests: int) -> LoadResult:
        warm = max(32, requests // 20)
        job = Closed(system.port, system.process.pid, size, requests=requests, seconds=self._plan.seconds, warm=warm)
        found = self._run(job)
        return part(found, found["good"])

    def _run(self, job: Closed | Open) -> dict[str, Any]:
        with pinned(self._cores):
            done = subprocess.run(command(job), stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def part(found: dict[str, Any], units: int) -> LoadResult:
    return LoadResult(
        found["good"],
        found["errors"],
        rate=found["good"] / found["seconds"],
        busy=found["cpu_s"] / found["seconds"],
        each=found["cpu_s"] / units * 1e6 if units else 0.0,
    )


def score(name: str, version: str, turns: Sequence[Turn], rss: int, peak: int) -> Score:
    """A system's line: the least CPU, the highest rate, the median of what it adds to TTFT; all errors."""
    fastest = max((turn.short for turn in turns), key=lambda short: short.rate)
    return Score(
        name,
        version,
        short_us=min(turn.short.each for turn in turns),
        long_us=min(turn.long.each for turn in turns),
        chunk_us=min(turn.chunks.each for turn in turns),
        rate=fastest.rate,
        busy=fastest.busy,
        added_p50_ms=statistics.median(turn.wait.added_p50 for turn in turns) * 1000,
        added_p99_ms=statistics.median(turn.wait.added_p99 for turn in turns) * 1000,
        stream_rate=statistics.median(turn.wait.rate for turn in turns),
        rss_mb=rss / 1e6,
        peak_mb=peak / 1e6,
        errors=total(turn.errors for turn in turns),
        rounds=[(turn.short.each, turn.long.each, turn.chunks.each) for turn in turns],
    )


def one_round(meter: Meter, running: Sequence[Running]) -> list[Turn]:
    """LoadResult by part, so that a part meets the systems within seconds: the machine is not the same a minute later."""
    short = [meter.short(each) for each in running]
    long = [meter.long(each) for each in running]
    chunks = [meter.chunks(each) for each in running]
    waits = [meter.wait(each, short[place], chunks[place]) for place, each in enumerate(running)]
    return [Turn(*parts) for parts in zip(short, long, chunks, waits, strict=True)]


def watch(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measure(plan: Plan, systems: Sequence[System], missing: list[str]) -> Iterator[tuple[Score, list[Turn]]]:
    """One score for each system that is there; why one is not goes into `missing`."""
    system_cores, load_cores = cores()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, INTERVAL_S, load_cores))
        running: list[Running] = []
        for system in systems:
            if system.path is None:
                missing.append(f"{system.name} is not installed: `scripts/peers.sh`, or {system.install}.")
                continue
            try:
                running.append(stack.enter_context(started(system, urls, folder / system.program, system_cores)))
            except NotStarted as error:
                missing.append(f"{system.name} {system.version()} did not start: {error}")
        for line in missing:
            watch(line)
        turns: dict[str, list[Turn]] = {each.system.name: [] for each in running}
        meter = Meter(plan, int(urls[0].rpartition(":")[2]), load_cores)
        for number in range(plan.rounds):
            begun = time.monotonic()
            for each, turn in zip(running, one_round(meter, running), strict=True):
                turns[each.system.name].append(turn)
                costs = f"{turn.short.each:.1f} and {turn.long.each:.1f} us a request, {turn.chunks.each:.1f} us a chunk"
                watch(f"round {number + 1}, {each.system.name}: {costs} {turn.errors or ''}")
            watch(f"round {number + 1} took {time.monotonic() - begun:.0f} s")
        for each in running:
            memory = rss_bytes(each.process.pid), peak_bytes(each.process.pid)
            found = turns[each.system.name]
            yield score(each.system.name, each.system.version(), found, *memory), found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__.splitlines()[0])
    known = [system.name for system in SYSTEMS]
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=known, metavar="A,B", help=f"of {', '.join(known)}"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {Plan().rounds}")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another version, made by its `hatch_build.py FOLDER`")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None, plan: Plan | None = None) -> None:
    options = parse(arguments)
    plan = plan or (QUICK if options.quick else Plan())
    if options.rounds:
        plan = Plan(**{**asdict(plan), "rounds": options.rounds})
    missing: list[str] = []
    systems = [system for system in SYSTEMS if system.name in options.only]
    if options.before:
        systems.append(another_build(options.before))
    found = list(measure(plan, systems, missing))
    scores = [one for one, _ in found]
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = draw(options.out / "gateway.png", scores)
    made_by = f"Made by `{shell_command('bench.gateway', arguments)}`: {versions()}."
    text = "\n".join(report(scores, missing, f"{made_by} {method(plan)}", drawn))
    (options.out / "gateway.md").write_text(text + "\n", "utf-8")
    kept = {
        "made_by": made_by,
        "plan": asdict(plan),
        "missing": missing,
        "scores": [{**asdict(one), "turns": [asdict(turn) for turn in turns]} for one, turns in found],
    }
    (options.out / "gateway.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(text)


def method(plan: Plan) -> str:
    rounds = "one round" if plan.rounds == 1 else f"{plan.rounds} rounds"
    return (
        f"{rounds[0].upper()}{rounds[1:]}, the systems in turns; of CPU the least, of added TTFT the median of the rounds. Each"
        " has one core, load and mock replicas have the others. How it is measured: [bench/README.md](../README.md#gateway)."
    )


if __name__ == "__main__":
    main()
