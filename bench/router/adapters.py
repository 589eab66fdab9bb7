"""Adapters (LoRA) on eight replicas: what the time of a load is worth in the price.

    python -m bench.router.adapters [--seeds N] [--requests N] [--out bench/reports]

Each session of gen:chat uses one of ADAPTERS adapters, the first ones more often (Zipf). A row is the production router without
the names of adapters; with them; and with exact knowledge of the time of a load, and of the adapters that are loaded.
"""

from __future__ import annotations

import argparse
import itertools
import platform
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

import xxhash

from bench.measure.machine import REPORTS, commit
from bench.router.ablation import FULL, ablated
from bench.router.policies import cases, loaded
from router.learning.adapters import SLOTS, Adapters
from router.simulation.fleet import FleetSpec, Result, RouterPlacement, Simulation, summary
from router.simulation.workloads import Arrival, SimulatedRequest, WorkloadSource
from router.types import KEY_BYTES, BlockKeys

REPLICAS, ADAPTERS, WORKLOAD = 8, 64, "gen:chat"
LOADS_S: Final = 0.05, 0.3
WITHOUT, DEFAULT, KNOWN = "no adapters in the price", "default", "*known*"
_WEIGHTS: Final = list(itertools.accumulate(1 / (number + 1) for number in range(ADAPTERS)))


class WithAdapters:
    """A workload whose sessions use adapters. Prompts of different adapters do not match."""

    def __init__(self, source: WorkloadSource) -> None:
        self._source = source

    def begin(self) -> Iterator[Arrival]:
        return (self._with(at, request) for at, request in self._source.begin())

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None:
        following = self._source.after(request, now)
        return following and self._with(*following)

    def _with(self, at: float, request: SimulatedRequest) -> Arrival:
        drawn = xxhash.xxh3_64_intdigest(request.session.encode()) / 2**64 * _WEIGHTS[-1]
        number = sum(weight < drawn for weight in _WEIGHTS)
        prompt = copy(request.prompt)
        prompt.adapter = f"adapter {number}"
        prompt.keys = _masked(prompt.keys, prompt.adapter)
        measured = request.measured and replace(request.measured, answered=_masked(request.measured.answered, prompt.adapter))
        return at, replace(request, prompt=prompt, measured=measured)


def _masked(keys: BlockKeys, adapter: str) -> BlockKeys:
    mask = xxhash.xxh3_64_digest(adapter.encode()) * (len(keys) // KEY_BYTES)
    return (int.from_bytes(keys) ^ int.from_bytes(mask)).to_bytes(len(keys))


class Unaware(RouterPlacement):
    """The router gets prompts without the names of their adapters."""

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, object]:  # type: ignore[override]
        prompt = copy(request.prompt)
        prompt.adapter = ""
        return super().place(replace(request, prompt=prompt), now)


class Known(Adapters):
    """Knows what the simulated replicas have loaded."""

    def __init__(self, simulation: Simulation, load_s: float) -> None:
        super().__init__()
        self._loaded = {f"r{replica.number}": replica.adapters for replica in simulation._replicas}
        self._load_s = load_s

    def load_s(self, replica: str, adapter: str) -> float:
        return 0.0 if self._loaded[replica].holds(adapter) else self._load_s


def run(row: str, load_s: float, seed: int, requests: int) -> Result:
    """One run of a row."""
    spec = FleetSpec(REPLICAS, cases()[WORKLOAD].kv_tokens, load_s=load_s)
    placement = (Unaware if row == WITHOUT else RouterPlacement)(ablated(FULL, seed), spec)
    simulation = Simulation(spec, WithAdapters(loaded(WORKLOAD, REPLICAS, seed).source()), placement)
    if row == KNOWN:
        placement.router.adapters = Known(simulation, load_s)
    served = list(itertools.islice(simulation.run(), requests))
    return summary(row, spec, served, simulation.busy_s)


def report(seeds: int, requests: int) -> Iterator[str]:
    yield "# Adapters\n"
    yield (
        f"Made by `python -m bench.router.adapters`: {commit()}, Python {platform.python_version()}. The first {requests:,}"
        f" requests of {WORKLOAD} on {REPLICAS} replicas that keep {SLOTS} adapters each; {ADAPTERS} adapters, of sessions by"
        f" Zipf's law. Mean TTFT in seconds, and the 99th percentile in brackets, over {seeds} seeds.\n"
    )
    yield "`known`: exactly what is loaded, and the time of a load. The default also counts the adapters of open requests.\n"
    yield f"| | {' | '.join(f'a load takes {load_s:g} s' for load_s in LOADS_S)} |"
    yield f"|---|{'--:|' * len(LOADS_S)}"
    for row in (WITHOUT, DEFAULT, KNOWN):
        cells = ([run(row, load_s, seed, requests) for seed in range(seeds)] for load_s in LOADS_S)
        means = ((fmean(one.ttft_mean_s for one in cell), fmean(one.ttft_p99_s for one in cell)) for cell in cells)
        yield f"| {row} | {' | '.join(f'{mean:.3f} ({worst:.2f})' for mean, worst in means)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.adapters", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each cell (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=3000, metavar="N", help="of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    text = "\n".join(report(options.seeds, options.requests)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "adapters.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
