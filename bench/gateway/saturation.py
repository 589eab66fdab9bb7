"""How evenly a gateway under saturation serves its clients: p50, p99 and the longest time of a request, beside its peers.

    python -m bench.gateway.saturation [--quick] [--sizes 220000] [--connections 200] [--only warmroute,nginx] [--before FOLDER]

Writes saturation.md and saturation.json. Closed loop: all clients connect and ask at once (`herd.py`), then each sends its
next request when its answer is complete. `direct` is the same load straight to a mock replica: what is slow there is due to
the load generator, the mock replica or the machine. --before: another version, compiled (`hatch_build.py`), in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gateway.data_plane import total, watch
from bench.gateway.systems import SYSTEMS, NotStarted, Running, System, another_build, mocks, started
from bench.measure.cpu import cores, pinned
from bench.measure.load import Closed, command
from bench.measure.machine import REPORTS, versions
from bench.measure.machine import command as shell_command

DIRECT, OURS = "direct", "warmroute"
REFERENCE = "nginx"  # it does the least that a proxy has to do
DEFAULT = ("warmroute", "sglang-router", "nginx")
INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """sizes: of the bodies, bytes. seconds: of one measurement; no request is sent after it."""

    sizes: tuple[int, ...] = (2_000, 32_000, 220_000, 1_000_000)
    connections: tuple[int, ...] = (20, 200, 400)
    rounds: int = 3
    seconds: float = 5.0


QUICK = Plan(sizes=(2_000, 220_000), connections=(200,), rounds=1, seconds=3.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One system under one load: medians over the rounds, all errors. rate: answers per second; cpu_us: per answer."""

    system: str
    size: int
    connections: int
    p50_s: float
    p99_s: float
    max_s: float
    rate: float
    cpu_us: float
    errors: dict[str, int]


def cell(system: str, job: Closed, found: Sequence[dict[str, Any]]) -> Cell:
    """found: the load generator's report of each round."""

    def median(name: str) -> float:
        return statistics.median(one.get(name, 0.0) for one in found)

    return Cell(
        system,
        job.size,
        job.connections,
        median("first_p50"),
        median("first_p99"),
        median("first_max"),
        rate=median("in_time") / job.seconds,
        cpu_us=statistics.median(one["cpu_s"] / max(1, one["good"]) * 1e6 for one in found),
        errors=total(one["errors"] for one in found),
    )


def measure(plan: Plan, systems: Sequence[System], missing: list[str]) -> Iterator[Cell]:
    """One cell for each load and system that is there, the direct load last; why a system is not goes into `missing`."""
    system_cores, load_cores = cores()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, INTERVAL_S, load_cores))
        running: list[Running] = []
        for number, system in enumerate(systems):
            if system.path is None:
                missing.append(f"{system.name} is not installed: `scripts/peers.sh`, or {system.install}.")
                continue
            try:
                running.append(stack.enter_context(started(system, urls, folder / str(number), system_cores)))
            except NotStarted as error:
                missing.append(f"{system.name} {system.version()} did not start: {error}")
        targets = [(each.system.name, each.port, each.process.pid) for each in running]
        targets.append((DIRECT, int(urls[0].rpartition(":")[2]), 0))
        for size in plan.sizes:
            for connections in plan.connections:
                job = Closed(0, size=size, connections=connections, requests=10**9, seconds=plan.seconds, at_once=True)
                yield from one_load(job, targets, plan.rounds, load_cores)


def one_load(job: Closed, targets: Sequence[tuple[str, int, int]], rounds: int, load_cores: set[int]) -> Iterator[Cell]:
    """targets: (name, port, process) of each system. They take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in targets}
    for number in range(rounds):
        for name, port, pid in targets:
            with pinned(load_cores):
                load = command(replace(job, port=port, pid=pid))
                done = subprocess.run(load, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout))
            watch(f"round {number + 1}: {line(cell(name, job, found[name][-1:]))}")
    for name, rows in found.items():
        yield cell(name, job, rows)


# -- the report


def kilobytes(size: int) -> str:
    return f"{size // 1_000_000} MB" if size >= 1_000_000 else f"{size // 1000} kB"


def line(one: Cell, reference: Cell | None = None) -> str:
    """A row. reference: whose p99 this one's is compared with."""
    name = f"**{one.system}**" if one.system == OURS else one.system
    times = " | ".join(f"{seconds * 1000:,.0f}" for seconds in (one.p50_s, one.p99_s, one.max_s))
    cpu = f"{one.cpu_us:,.0f}" if one.system != DIRECT else ""
    ratio = f"{one.p99_s / reference.p99_s:.2f}" if reference and reference.p99_s else ""
    return f"| {name} | {times} | {ratio} | {one.rate:,.0f} | {cpu} |"


def report(cells: Sequence[Cell], missing: Sequence[str], made_by: str) -> Iterator[str]:
    yield "# Saturation: how evenly clients are served\n"
    yield f"{made_by}\n"
    for size, connections in dict.fromkeys((one.size, one.connections) for one in cells):
        yield f"## {kilobytes(size)}, {connections} connections\n"
        yield f"| | p50 ms | p99 ms | max ms | p99 / {REFERENCE}'s | requests/s | CPU us per request |"
        yield "|---|--:|--:|--:|--:|--:|--:|"
        rows = [one for one in cells if (one.size, one.connections) == (size, connections)]
        reference = next((one for one in rows if one.system == REFERENCE), None)
        yield from (line(one, reference) for one in rows)
        yield ""
        for one in rows:
            if one.errors:
                reasons = ", ".join(f"{count} x {reason}" for reason, count in one.errors.items())
                yield f"**{one.system}: {reasons}.**\n"
    for why in missing:
        yield f"Left out: {why}\n"


def method(plan: Plan) -> str:
    rounds = "One round" if plan.rounds == 1 else f"Medians of {plan.rounds} rounds"
    return (
        f"{rounds} of {plan.seconds:g} s, the systems in turns. The system has one core, load and mocks have the others."
        " How it is measured: [bench/README.md](../README.md#saturation)."
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.saturation", description=__doc__.splitlines()[0])
    known = [system.name for system in SYSTEMS]
    parser.add_argument("--quick", action="store_true", help="two loads, one short round")
    parser.add_argument("--sizes", type=_numbers, metavar="N,N", help="bytes of a body")
    parser.add_argument("--connections", type=_numbers, metavar="N,N")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S", help="of one measurement")
    only = ", ".join(known)
    parser.add_argument("--only", type=lambda text: text.split(","), default=DEFAULT, metavar="A,B", help=f"of {only}")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another version, made by its `hatch_build.py FOLDER`")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: {unknown[0]!r} is not one of {only}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    chosen = {name: getattr(options, name) for name in ("sizes", "connections", "rounds", "seconds") if getattr(options, name)}
    plan = replace(QUICK if options.quick else Plan(), **chosen)
    systems = [system for system in SYSTEMS if system.name in options.only]
    if options.before:
        systems.insert(0, another_build(options.before))
    missing: list[str] = []
    cells = list(measure(plan, systems, missing))
    options.out.mkdir(parents=True, exist_ok=True)
    made_by = f"Made by `{shell_command('bench.gateway.saturation', arguments)}`: {versions()}. {method(plan)}"
    text = "\n".join(report(cells, missing, made_by)).rstrip("\n")
    (options.out / "saturation.md").write_text(text + "\n", "utf-8")
    kept = {"made_by": made_by, "plan": asdict(plan), "missing": missing, "cells": [asdict(one) for one in cells]}
    (options.out / "saturation.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
