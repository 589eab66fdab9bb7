"""What each term of the cost is worth: the production router with one of them left out, on traces and generators.

    python -m bench.router.ablation [--workers N] [--out bench/reports]

A candidate carries its cost in parts, so leaving one out is a policy that ranks by the rest. Only the default policy pays rent
for hot prefixes (`router/pricing/replication.py`), and lets requests wait in line (`router/late.py`), so the terms are left out
of a cost without both, which has its own row. What is no part of its own is left out of the router, at the full cost.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from bench.measure.machine import REPORTS, commit, trace_folder
from bench.router.policies import cases, loaded
from gateway.config.schema import RoutingConfig
from router import Replica, Router
from router.booking import Booking
from router.learning.conversations import ConversationWork
from router.policies.least_cost import LeastCost
from router.policies.policy import KeyPolicy, Policies
from router.simulation.fleet import FleetSpec, Result, RouterPlacement, SharedQueue, Simulation, summary
from router.types import Candidate

REPLICAS = 8
FULL, NO_RENT, POOLED = "full cost", "without rent and late binding", "*pooled*"


def _own_waiting(candidate: Candidate) -> float:
    return candidate.cost.queue_s + candidate.cost.prefill_s


ABLATIONS: Mapping[str, Callable[[Candidate], float]] = MappingProxyType(
    {
        NO_RENT: lambda one: one.cost.total_s,
        "... and without the delay of others": lambda one: one.cost.total_s - one.cost.others_s,
        "... and without the price of duplicates": lambda one: one.cost.total_s - one.cost.duplicate_s,
        "... and without the price of evictions": lambda one: one.cost.total_s - one.cost.evicted_s,
        "... and without decode pressure": lambda one: one.cost.total_s - one.cost.decode_s,
        "only our own TTFT: queue + uncached": _own_waiting,
        "only uncached: the longest prefix": lambda one: one.cost.prefill_s,
    }
)


class FirstCome(Router):
    """Sends each request at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ledger.has_lines = False

    def _line_up(self, booking: Booking, now: float) -> None:
        self._credit(booking)


class NoSecondChoice(Router):
    """Sends a request after its wait in line, whatever its replica holds then."""

    def _lost_match_s(self, booking: Booking, now: float) -> float:
        return 0.0


class FreeConversations(ConversationWork):
    """The later turns of a conversation cost nothing."""

    def worked(self, seconds: float) -> None:
        super().worked(seconds)
        self.value = 0.0


class NoBusyShare(Router):
    """Prices no later turns on busy replicas."""

    def add(self, replica: Replica) -> None:
        super().add(replica)
        self.ledger.rates.of(replica.name).pool.conversation = FreeConversations()


ROUTERS: Mapping[str, type[Router]] = MappingProxyType(
    {
        "full cost, first come, first served": FirstCome,
        "full cost, late binding without a second choice": NoSecondChoice,
        "full cost without the busy share": NoBusyShare,
    }
)
ROWS = (FULL, *ROUTERS, *ABLATIONS, POOLED)
WORKLOADS = MappingProxyType(  # name -> seeds
    {
        "conversation": 6,
        "agents_1m": 6,
        "agents_250k": 6,
        "gen:shared_prompt": 1,
        "gen:chat": 6,
        "gen:agents": 8,
        "gen:no_reuse": 1,
    }
)


POLICIES: Policies = {
    **dict.fromkeys((FULL, *ROUTERS), LeastCost),
    **{row: functools.partial(KeyPolicy, key) for row, key in ABLATIONS.items()},
}


def ablated(row: str, seed: int) -> Router:
    """The production router with a part of its cost left out."""
    memory, chance = RoutingConfig().memory_mb << 20, random.Random(seed)
    kind = ROUTERS.get(row, Router)
    return kind(policy=row, policies=POLICIES, ttl_s=RoutingConfig().ttl_s, memory_bytes=memory, chance=chance)


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    row: str
    workload: str
    seed: int


def run(job: Job) -> tuple[Job, Result]:
    workload, spec = loaded(job.workload, REPLICAS, job.seed), FleetSpec(REPLICAS, cases()[job.workload].kv_tokens)
    if job.row == POOLED:
        simulation = Simulation(spec, workload.source(), SharedQueue(), shared=True)
    else:
        simulation = Simulation(spec, workload.source(), RouterPlacement(ablated(job.row, job.seed), spec))
    return job, summary(job.row, spec, list(simulation.run()), simulation.busy_s)


def report(found: Mapping[tuple[str, str], list[Result]], workloads: list[str]) -> Iterator[str]:
    yield "# What each term is worth\n"
    yield (
        f"Made by `python -m bench.router.ablation`: {commit()}, Python {platform.python_version()}. {REPLICAS} replicas, mean"
        " TTFT in seconds, token hit ratio in brackets; means over seeds ("
        + ", ".join(f"{name} {WORKLOADS[name]}" for name in workloads)
        + "). Differences under 3 % are noise.\n"
    )
    yield f"| cost | {' | '.join(workloads)} |"
    yield f"|---|{'--:|' * len(workloads)}"
    for row in ROWS:
        cells = (found[row, name] for name in workloads)
        means = ((fmean(one.ttft_mean_s for one in cell), fmean(one.hit_ratio for one in cell)) for cell in cells)
        yield f"| {row} | {' | '.join(f'{ttft:.3f} ({hits:.0%})' for ttft, hits in means)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.ablation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    workloads = [name for name in WORKLOADS if not (file := cases()[name].file) or (trace_folder() / file).exists()]
    jobs = [Job(row, name, seed) for name in workloads for seed in range(WORKLOADS[name]) for row in ROWS]
    found: dict[tuple[str, str], list[Result]] = {}
    with multiprocessing.Pool(options.workers) as pool:
        for job, result in pool.imap(run, jobs):
            found.setdefault((job.row, job.workload), []).append(result)
    text = "\n".join(report(found, workloads)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ablation.md").write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
