"""Requests of others on two of eight replicas: what the engines' reports of their load are worth, beside an oracle.

    python -m bench.router.foreign [--seeds N] [--out bench/reports]

A batch job sends bursts of BURST cold prompts straight to the first two replicas, and takes SHARE of their time. A row is the
production router without reports of the engines; with one for each probe; as the gateway asks by default, more often while
others use an engine; and an oracle: each foreign request is booked when it arrives, with its exact work, as another router's.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.measure.machine import REPORTS, commit, trace_folder
from bench.router.ablation import FULL, ablated
from bench.router.policies import cases, loaded
from gateway.config.schema import HealthConfig
from gateway.fleet.prober import LOAD_S
from router.load import Lease
from router.simulation.fleet import FleetSpec, Foreign, Result, RouterPlacement, ServedRequest, Simulation, summary
from router.simulation.workloads import SimulatedRequest
from router.types import Prompt, Random

REPLICAS, BUSY = 8, 2
SHARE: Final = 0.5  # of the busy replicas' prefill
BURST, TOKENS, OUTPUT = 8, 3000, 100
HOURS_S: Final = 3600.0
WITHOUT, REGULAR, DEFAULT, ORACLE = (
    "no reports",
    "a report every 2 s",
    f"default: every {LOAD_S:g} s while others are seen",
    "*oracle*",
)
REPORTS_S = {WITHOUT: 0.0, REGULAR: HealthConfig().interval_s, DEFAULT: LOAD_S, ORACLE: 0.0}
WORKLOADS = ("conversation", "gen:chat", "gen:rag")


def batch_job(chance: Random, prefill_rate: float, until_s: float) -> Iterator[Foreign]:
    """Bursts at random times, on one of the busy replicas each."""
    now, gap_s = 0.0, BURST * TOKENS / (SHARE * prefill_rate * BUSY)
    while (now := now + chance.expovariate(1 / gap_s)) < until_s:
        number = chance.randrange(BUSY)
        for _ in range(BURST):
            keys = chance.getrandbits(64 * (TOKENS // 64)).to_bytes(8 * (TOKENS // 64), "little")
            yield now, number, SimulatedRequest(Prompt(keys, TOKENS, 64, ""), OUTPUT, "job")


class Watching(Simulation):
    """Asks as the gateway's probes do (`gateway/fleet/prober.py`)."""

    router: RouterPlacement

    def _report(self, _: None, now: float) -> None:
        regular = round(now / LOAD_S) % round(HealthConfig().interval_s / LOAD_S) == 0
        for replica in self._replicas:
            if regular or self.router.router.ledger.shared(f"r{replica.number}", now):
                self._placement.reported(replica.number, replica.running, len(replica.queue), now)
        self._at(now + LOAD_S, self._report, None)


class Oracle(Simulation):
    """Books each foreign request when it arrives."""

    router: RouterPlacement
    leases: dict[int, Lease]

    def _foreign_comes(self, served: ServedRequest | None, now: float) -> None:
        if served is not None:
            router, tokens = self.router.router, served.request.tokens
            self.leases[id(served)] = router.ledger.open(f"r{served.replica}", tokens, tokens, now, remote=True)
        super()._foreign_comes(served, now)

    def _prefilled(self, served: ServedRequest, now: float) -> None:
        if served.foreign:
            self.leases[id(served)].first_token(now)
        super()._prefilled(served, now)

    def _finished(self, served: ServedRequest, now: float) -> None:
        if served.foreign:
            self.leases.pop(id(served)).close(now)
        super()._finished(served, now)


def run(row: str, workload: str, seed: int) -> Result:
    """One run of a row."""
    spec = FleetSpec(REPLICAS, cases()[workload].kv_tokens, reports_s=REPORTS_S[row])
    source, job = loaded(workload, REPLICAS, seed).source(), batch_job(random.Random(seed), spec.prefill_rate, HOURS_S / 2)
    placement = RouterPlacement(ablated(FULL, seed), spec)
    Oracle.router, Oracle.leases, Watching.router = placement, {}, placement
    kind = {ORACLE: Oracle, DEFAULT: Watching}.get(row, Simulation)
    simulation = kind(spec, source, placement, foreign=job)
    served = [one for one in simulation.run() if one.arrived < HOURS_S / 2]
    return replace(summary(row, spec, served, simulation.busy_s), policy=row)


def report(workloads: list[str], seeds: int) -> Iterator[str]:
    yield "# Load of others\n"
    yield (
        f"Made by `python -m bench.router.foreign`: {commit()}, Python {platform.python_version()}. Mean TTFT in seconds over"
        f" {seeds} seeds, and in percent of the oracle. {BUSY} of {REPLICAS} replicas also serve a batch job: half"
        f" of their prefill, in bursts of {BURST} prompts of {TOKENS} tokens.\n"
    )
    yield f"| | {' | '.join(workloads)} |"
    yield f"|---|{'--:|' * len(workloads)}"
    found = {row: [fmean(run(row, name, seed).ttft_mean_s for seed in range(seeds)) for name in workloads] for row in REPORTS_S}
    for row, means in found.items():
        cells = (f"{mean:.3f} ({mean / best:.0%})" for mean, best in zip(means, found[ORACLE], strict=True))
        yield f"| {row} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.foreign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each cell (default: %(default)s)")
    parser.add_argument("--workload", default=",".join(WORKLOADS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    names = [
        name for name in options.workload.split(",") if not (file := cases()[name].file) or (trace_folder() / file).exists()
    ]
    text = "\n".join(report(names, options.seeds)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "foreign.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
