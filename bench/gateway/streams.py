"""Thousands of streams at once through the gateway: is one lost, does memory grow, does a chunk come late?

    python -m bench.gateway.streams [--streams 2000] [--seconds 60] [--interval 0.1] [--out bench/reports]

Writes streams.md and streams.json. As many streams begin within --ramp seconds and last --seconds each; a twentieth as many
go to a mock replica itself, from the same process at the same time, to show what the machine, the load and the mock add. The
time from a chunk to the next is taken once all streams have begun. Memory: of the gateway's process tree, once a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gateway.systems import SYSTEMS, Running, mocks, started
from bench.measure.cpu import cores, cpu_seconds, pinned, rss_bytes
from bench.measure.load import Open, command
from bench.measure.machine import REPORTS, versions
from bench.measure.machine import command as shell_command

SAMPLE_S = 1.0
SHOWN = 12  # lines of the table of memory over time
SETTLE_S = 0.05  # the settling of the last streams that began


@dataclass(frozen=True, slots=True)
class Result:
    """through, direct: the tallies of the load. memory: (seconds since the start, bytes); idle: bytes before."""

    options: dict[str, Any]
    through: dict[str, Any]
    direct: dict[str, Any]
    idle: int
    memory: list[tuple[float, int]]
    cpu_s: float
    chunk_us: float

    @property
    def lost(self) -> int:
        sent, good = self.through["sent"], self.through["good"]
        return int(sent - good)

    def between(self, begin: float, end: float) -> list[int]:
        return [size for at, size in self.memory if begin <= at <= end]


def measure(options: argparse.Namespace) -> Result:
    system_cores, load_cores = cores()
    ours = next(system for system in SYSTEMS if system.name == options.system)
    if ours.path is None:
        raise SystemExit(f"{ours.name} is not there: {ours.install}")
    with (
        tempfile.TemporaryDirectory() as folder,
        mocks(2, options.interval, load_cores) as urls,
        started(ours, urls, Path(folder), system_cores) as running,
    ):
        beside = max(1, options.streams // 20)
        job = Open(
            running.port,
            int(urls[0].rpartition(":")[2]),
            rate=options.streams / options.ramp,
            beside=beside / options.ramp,
            seconds=options.ramp,
            chunks=max(1, round(options.seconds / options.interval)),
            even=True,
            settle=options.ramp + SETTLE_S,
            patience=options.seconds + 60,
        )
        return watched(options, running, job, load_cores)


def watched(options: argparse.Namespace, running: Running, job: Open, load_cores: set[int]) -> Result:
    """Runs the load and looks at the gateway's memory meanwhile."""
    pid = running.process.pid
    idle, spent, memory, begun = rss_bytes(pid), cpu_seconds(pid), [], time.monotonic()
    with pinned(load_cores):
        load = subprocess.Popen(command(job), stdout=subprocess.PIPE, text=True)
    assert load.stdout is not None
    try:
        while load.poll() is None:
            memory.append((time.monotonic() - begun, rss_bytes(pid)))
            time.sleep(SAMPLE_S)
        spent = cpu_seconds(pid) - spent
        found = json.loads(load.stdout.read())
    finally:
        load.kill()
        load.wait()
        load.stdout.close()
    kept = {key: value for key, value in vars(options).items() if key != "out"}
    words = found["through"]["words"]
    return Result(kept, found["through"], found["direct"], idle, memory, spent, spent / words * 1e6 if words else 0.0)


# -- the report


def report(result: Result, made_by: str) -> Iterator[str]:
    through, options = result.through, result.options
    yield "# Streams: many at once\n"
    yield f"{made_by}\n"
    yield (
        f"{through['sent']:,} streams through {options['system']}, each {options['seconds']:g} s, a chunk every"
        f" {options['interval'] * 1000:g} ms, begun within {options['ramp']:g} s; its CPU {result.chunk_us:.1f} us per chunk.\n"
    )
    yield f"**Streams lost: {result.lost} of {through['sent']:,}.** Chunks received: {through['words']:,}.\n"
    for where, tally in (("through it", through), ("direct", result.direct)):
        if tally["errors"]:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in tally["errors"].items())
            yield f"Errors {where}: {reasons}.\n"
    yield "| | from chunk to chunk p50 ms | p99 ms |"
    yield "|---|--:|--:|"
    for name, tally in ((f"**{options['system']}**", through), ("direct to the replica", result.direct)):
        times = [f"{tally[key] * 1000:.2f}" if key in tally else "" for key in ("gap_p50", "gap_p99")]
        yield f"| {name} | {' | '.join(times)} |"
    yield "\n## Memory\n"
    yield from memory(result)


def memory(result: Result) -> Iterator[str]:
    """All streams are open from the end of the ramp until the first of them ends."""
    ramp, seconds = result.options["ramp"], result.options["seconds"]
    full = result.between(ramp + SAMPLE_S, seconds)
    if len(full) >= 2:
        third = max(1, len(full) // 3)
        early, late = sum(full[:third]) / third, sum(full[-third:]) / third
        each = (late - result.idle) / max(1, result.through["sent"])
        yield (
            f"Idle {result.idle / 1e6:.1f} MB; with all streams open {early / 1e6:.1f} MB in the first third of the time and"
            f" {late / 1e6:.1f} MB in the last ({late / early - 1:+.1%}): {each / 1000:.1f} kB a stream.\n"
        )
    yield "| s | RSS MB |"
    yield "|--:|--:|"
    step = max(1, len(result.memory) // SHOWN)
    for at, size in result.memory[::step]:
        yield f"| {at:.0f} | {size / 1e6:.1f} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.streams", description=__doc__.splitlines()[0])
    known = [system.name for system in SYSTEMS]
    parser.add_argument("--streams", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each stream (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=0.1, metavar="S", help="between its chunks (default: %(default)s)")
    parser.add_argument("--ramp", type=float, default=5.0, metavar="S", help="in which they begin (default: %(default)s)")
    parser.add_argument("--system", choices=known, default="warmroute", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    result = measure(options)
    options.out.mkdir(parents=True, exist_ok=True)
    made_by = f"Made by `{shell_command('bench.gateway.streams', arguments)}`: {versions()}."
    text = "\n".join(report(result, made_by))
    (options.out / "streams.md").write_text(text + "\n", "utf-8")
    kept = {"made_by": made_by, "lost": result.lost, **asdict(result)}
    (options.out / "streams.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
