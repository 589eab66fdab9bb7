"""Retention hints (`routing.retain`): prompts that name a session are evicted last, beside prompts that name none.

    python -m bench.router.retention [--seeds N] [--out bench/reports]

Eight simulated replicas with the block ledger of `warmroute replica`, and two generators at once, at about half of their load
each; the requests of the second one name no session. The router does not know that the replicas retain anything, as in the
gateway. Simulated seconds: equal on every machine.
"""

from __future__ import annotations

import argparse
import heapq
import platform
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Final

from bench.measure.machine import REPORTS, commit
from bench.router.ablation import FULL, ablated
from replica.api.generation import RETENTION_S
from replica.cache.blocks import BlockLedger
from replica.cache.prefix import Prefix
from router.simulation.fleet import Cache, FleetSpec, RouterPlacement, ServedRequest, Simulation
from router.simulation.generators import BLOCK, Agents, ChatWorkload, Generator, NoReuse
from router.simulation.workloads import Arrival, SimulatedRequest, WorkloadSource
from router.types import KEY_BYTES

REPLICAS: Final = 8
KEEP_S: Final = RETENTION_S["5m"]
HOURS: Final = 0.3
MIXES: Mapping[str, tuple[Generator, Generator]] = MappingProxyType(
    {
        "chat, and one-shot prompts": (ChatWorkload(hours=HOURS, users=52), NoReuse(hours=HOURS, rate=0.55)),
        "agents, and chat": (Agents(hours=HOURS, users=5), ChatWorkload(hours=HOURS, users=52)),
    }
)


class RetainingCache(Cache):
    """The cache of a simulated replica, evicted as by `warmroute replica`. keep_s: for prompts that name a session."""

    def __init__(self, capacity_tokens: int, keep_s: float) -> None:
        super().__init__(capacity_tokens)
        self._ledger, self._keep_s = BlockLedger(capacity_tokens // BLOCK, BLOCK), keep_s

    def take(self, request: SimulatedRequest, now: float) -> int:
        return request.cached(self._use(request, now))

    def release(self, request: SimulatedRequest, now: float) -> None:
        self._use(request, now)

    def _use(self, request: SimulatedRequest, now: float) -> int:
        """Use the blocks of a prompt. Returns the number of cached ones."""
        keys, prefix = request.prompt.keys, Prefix((), BLOCK)
        prefix.keys = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)][: self._ledger.capacity]
        prefix.matchable = len(prefix.keys)
        lease = self._ledger.reserve(prefix, len(prefix.keys), now, self._keep_s if request.prompt.session_key else 0.0)
        assert lease is not None, "all blocks are idle"
        cached = lease.shared
        self._ledger.commit(lease, len(prefix.keys))
        self._ledger.release(lease, now)
        return cached


class Mix:
    """Two workloads at once. The requests of the second one name no session."""

    def __init__(self, named: WorkloadSource, nameless: WorkloadSource) -> None:
        self._named, self._nameless = named, nameless

    def begin(self) -> Iterator[Arrival]:
        return heapq.merge(self._named.begin(), map(_nameless, self._nameless.begin()), key=lambda arrival: arrival[0])

    def after(self, request: SimulatedRequest, now: float) -> Arrival | None:
        if request.prompt.session_key:
            return self._named.after(request, now)
        following = self._nameless.after(request, now)
        return following and _nameless(following)


def _nameless(arrival: Arrival) -> Arrival:
    prompt = arrival[1].prompt
    prompt.session, prompt.session_key = "", 0
    return arrival


@dataclass(frozen=True, slots=True)
class Row:
    """hits: share of the prompt tokens that were cached. Mean TTFT in seconds: of all, with a session, without."""

    hits: float
    all_s: float
    named_s: float
    nameless_s: float


def run(mix: str, seed: int, *, retain: bool) -> Row:
    spec = FleetSpec(REPLICAS)
    source = Mix(*(each.source(REPLICAS, random.Random(seed)) for each in MIXES[mix]))
    simulation = Simulation(spec, source, RouterPlacement(ablated(FULL, seed), spec))
    for replica in simulation._replicas:
        replica.cache = RetainingCache(spec.kv_tokens, KEEP_S if retain else 0.0)
    return summary(list(simulation.run()))


def summary(served: list[ServedRequest]) -> Row:
    named = [one.first_token - one.arrived for one in served if one.request.prompt.session_key]
    nameless = [one.first_token - one.arrived for one in served if not one.request.prompt.session_key]
    hits = sum(one.cached_tokens for one in served) / sum(one.request.tokens for one in served)
    return Row(hits, fmean(named + nameless), fmean(named), fmean(nameless))


def report(seeds: int) -> Iterator[str]:
    yield "# Retention hints\n"
    yield (
        f"Made by `python -m bench.router.retention`: {commit()}, Python {platform.python_version()}, means over {seeds} seeds."
        f" {REPLICAS} replicas, {HOURS} hours of two generators at once, at about half of their load each. The first one's"
        " prompts name their sessions, the second one's name none.\n"
    )
    yield "| traffic | `routing.retain` | hits | TTFT mean s | with a session | without |"
    yield "|---|---|--:|--:|--:|--:|"
    for mix in MIXES:
        for retain in (False, True):
            rows = [run(mix, seed, retain=retain) for seed in range(seeds)]
            hits = fmean(row.hits for row in rows)
            times = (fmean(getattr(row, name) for row in rows) for name in ("all_s", "named_s", "nameless_s"))
            yield f"| {mix} | {str(retain).lower()} | {hits:.1%} | {' | '.join(f'{each:.3f}' for each in times)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.retention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each row (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    text = "\n".join(report(options.seeds)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "retention.md").write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
