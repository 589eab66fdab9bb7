"""Routing by history, by engines' cache events, and by both, where others use the same replicas and caches are too small.

    python -m bench.router.cache_events [--out bench/reports]

Four simulated replicas. A part of the conversations goes to the replicas past the router, each to one of them at random. The
caches are so large that the blocks of the whole workload are PRESSURES times as much. history: the production router without
events. events: matches by the replicas' caches alone, which does not know what is being computed. both: as the gateway does it
with `kv_events.follow`. Events arrive at once, and all prompts have their token ids. Simulated seconds: equal on every machine.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

import xxhash

from bench.measure.machine import REPORTS, commit
from gateway.config.schema import RoutingConfig
from router import Outcome, Router
from router.residency import HeldPrefix, PromptTokens, Residency
from router.simulation.fleet import FleetSpec, RouterPlacement, ServedRequest, Simulation
from router.simulation.generators import Agents
from router.simulation.workloads import SimulatedRequest
from router.types import KEY_BYTES

PRESSURES: Final = (0.5, 1.0, 2.0, 4.0)
FOREIGN: Final = (0.0, 0.3)
REPLICAS: Final = 4
HOURS: Final = 0.15
MODES: Final = ("history", "events", "both")


class SimulatedTokens(PromptTokens):
    """Stands for the token ids of a simulated prompt."""

    def __init__(self, request: SimulatedRequest) -> None:
        super().__init__(b"", True)
        self.request = request

    @property
    def count(self) -> int:
        return self.request.tokens


class SimulatedCaches(Residency):
    """Knows the caches of a simulation, as its replicas' events would tell. certain: in-flight prompts count beside them."""

    def __init__(self, simulation: Simulation, names: Sequence[str], *, certain: bool) -> None:
        self._caches = {name: replica.cache for name, replica in zip(names, simulation._replicas, strict=True)}
        self._certain = certain

    def held(self, tokens: PromptTokens, replica: str) -> HeldPrefix | None:
        assert isinstance(tokens, SimulatedTokens)
        cached = self._caches[replica].look_up(tokens.request, 0.0)
        return HeldPrefix(cached, cached, self._certain)


class MixedPlacement(RouterPlacement):
    """The router, past which a part of the conversations goes to the replicas."""

    def __init__(self, router: Router, spec: FleetSpec, foreign: float, *, tokens: bool) -> None:
        super().__init__(router, spec)
        self._count, self._foreign, self._tokens = len(spec.names), foreign, tokens

    def is_foreign(self, request: SimulatedRequest) -> bool:
        return xxhash.xxh32_intdigest(request.session.encode()) < self._foreign * (1 << 32)

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, Any]:
        if self.is_foreign(request):
            return xxhash.xxh32_intdigest(request.session.encode(), 1) % self._count, None
        request.prompt.tokens = SimulatedTokens(request) if self._tokens else None
        return super().place(request, now)

    def first_token(self, handle: Any, now: float) -> None:
        if handle is not None:
            super().first_token(handle, now)

    def finished(self, handle: Any, outcome: Outcome, now: float) -> None:
        if handle is not None:
            super().finished(handle, outcome, now)


@dataclass(frozen=True, slots=True)
class Row:
    """hits: share of the prompt tokens of routed requests that were cached. off: predicted less reported, as a share of the
    reported ones, without regard to its sign.
    """

    mode: str
    hits: float
    ttft_s: float
    off: float


def _generator() -> Agents:
    return Agents(hours=HOURS)


def run(mode: str, kv_tokens: int, foreign: float, seed: int) -> Row:
    spec, routing = FleetSpec(replicas=REPLICAS, kv_tokens=kv_tokens), RoutingConfig()
    router = Router(policy="cost", ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20, chance=random.Random(seed))
    placement = MixedPlacement(router, spec, foreign, tokens=mode != "history")
    source = _generator().source(REPLICAS, random.Random(seed))
    simulation = Simulation(spec, source, placement)
    if mode != "history":
        router.residency = SimulatedCaches(simulation, spec.names, certain=mode == "both")
        if mode == "events":
            router.retune(policy="cost", ttl_s=1e-9, memory_bytes=routing.memory_mb << 20)  # the index believes nothing
    return summary(mode, [one for one in simulation.run() if one.handle is not None])


def summary(mode: str, served: Sequence[ServedRequest]) -> Row:
    cached = sum(one.cached_tokens for one in served)
    off = sum(abs(one.handle.chosen.matched_tokens - one.cached_tokens) for one in served)
    tokens = sum(one.request.tokens for one in served)
    ttft_s = sum(one.first_token - one.arrived for one in served) / len(served)
    return Row(mode, cached / tokens, ttft_s, off / max(1, cached))


def distinct_tokens(seed: int) -> int:
    """The tokens of the blocks of the whole workload."""
    spec = FleetSpec(replicas=REPLICAS)
    router = Router(policy="round_robin", ttl_s=1.0, memory_bytes=1 << 20, chance=random.Random(0))
    source, known, tokens = _generator().source(REPLICAS, random.Random(seed)), set[bytes](), 0.0
    for one in Simulation(spec, source, RouterPlacement(router, spec)).run():
        keys = one.request.prompt.keys
        for at in range(0, len(keys), KEY_BYTES):
            if (key := keys[at : at + KEY_BYTES]) not in known:
                known.add(key)
                tokens += one.request.block_tokens
    return int(tokens)


def mean(mode: str, pressure: float, foreign: float, totals: Sequence[int]) -> tuple[Row, float]:
    """(the means over seeds, the standard error of the mean TTFT). totals: tokens in distinct blocks, by seed."""
    rows = [run(mode, int(total / pressure / REPLICAS), foreign, seed) for seed, total in enumerate(totals)]
    ttft_s = [row.ttft_s for row in rows]
    spread_s = stdev(ttft_s) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
    return Row(mode, fmean(row.hits for row in rows), fmean(ttft_s), fmean(row.off for row in rows)), spread_s


def report(seeds: int) -> Iterator[str]:
    totals = [distinct_tokens(seed) for seed in range(seeds)]
    yield "# Cache events\n"
    yield (
        f"Made by `python -m bench.router.cache_events`: {commit()}, Python {platform.python_version()}, means over {seeds}"
        f" seeds. {REPLICAS} replicas, generator `agents` for {HOURS} hours, {fmean(totals):,.0f} tokens in distinct blocks."
        " Pressure: these over all caches together. Foreign: share of the conversations that go past the router. Off: the"
        " difference between predicted and real cached tokens, over the real ones.\n"
    )
    yield "| foreign | pressure | routing by | hits | TTFT mean s | off |"
    yield "|--:|--:|---|--:|--:|--:|"
    for foreign in FOREIGN:
        for pressure in PRESSURES:
            for mode in MODES:
                row, spread_s = mean(mode, pressure, foreign, totals)
                ttft = f"{row.ttft_s:.3f} ± {spread_s:.3f}"
                yield f"| {foreign:.0%} | {pressure} | {mode} | {row.hits:.1%} | {ttft} | {row.off:.2%} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.cache_events", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    lines = list[str]()
    for line in report(options.seeds):
        print(line, flush=True)
        lines.append(line)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cache-events.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
