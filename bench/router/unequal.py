"""One replica of eight at a quarter of the speed: what work it gets, and what not knowing the speeds costs.

    python -m bench.router.unequal [--out bench/reports]

Every load is simulated twice: with the production router, which learns the speeds from what it sees, and with one that is
given them and does not learn. The slow replica's share is its prefill tokens over the mean of the others': at light load less
than a quarter, for a fast replica answers sooner even when there is a short queue; a quarter when all are busy.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measure.machine import REPORTS, commit
from gateway.config.schema import RoutingConfig
from router import Router
from router.simulation.fleet import FleetSpec, RouterPlacement, ServedRequest, Simulation
from router.simulation.generators import GENERATORS
from router.simulation.workloads import OpenLoop

SPEEDS = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.25)
LOADS = (0.8, 1.0, 1.2, 1.3, 1.4, 1.5)  # times the generator's own rate
GENERATOR = "no_reuse"
ENDLESS = 1e200  # tokens: evidence that does not age


@dataclass(frozen=True, slots=True)
class Row:
    """load: fraction of the fleet's prefill capacity that came in. Times in seconds."""

    load: float
    learned_ttft_s: float
    known_ttft_s: float
    share: float

    @property
    def ratio(self) -> float:
        return self.learned_ttft_s / self.known_ttft_s


def run(source: OpenLoop, seed: int, *, known: bool) -> list[ServedRequest]:
    spec, routing = FleetSpec(speeds=SPEEDS), RoutingConfig()
    router = Router(policy="cost", ttl_s=routing.ttl_s, memory_bytes=routing.memory_mb << 20, chance=random.Random(seed))
    placement = RouterPlacement(router, spec)
    if known:
        for name, speed in zip(spec.names, SPEEDS, strict=True):
            router.ledger.rates.of(name).restore((ENDLESS, ENDLESS / (spec.prefill_rate * speed)))
        router.ledger.rates.refresh()
    return list(Simulation(spec, source, placement).run())


def measure(load: float, seed: int) -> Row:
    generator = GENERATORS[GENERATOR]
    arrivals = [(at / load, request) for at, request in generator.source(len(SPEEDS), random.Random(seed)).begin()]
    learned, known_speeds = (run(OpenLoop(arrivals), seed, known=known) for known in (False, True))
    tokens = [0.0] * len(SPEEDS)
    for one in learned:
        tokens[one.replica] += one.request.prompt.units - one.cached_tokens
    capacity = FleetSpec().prefill_rate * sum(SPEEDS) * generator.hours * 3600 / load
    mean = sum(tokens[:-1]) / (len(tokens) - 1)
    return Row(sum(tokens) / capacity, ttft(learned), ttft(known_speeds), tokens[-1] / mean)


def ttft(served: list[ServedRequest]) -> float:
    return sum(one.first_token - one.arrived for one in served) / len(served)


def report(rows: list[Row], seed: int) -> Iterator[str]:
    yield "# A slow replica\n"
    yield (
        f"Made by `python -m bench.router.unequal`: {commit()}, Python {platform.python_version()}, seed {seed}. Eight replicas"
        f", one at a quarter of the speed, the generator `{GENERATOR}` at rising load; nothing configured. Load: of the fleet's"
        " prefill capacity. Share: the slow replica's work over the mean of the others'.\n"
    )
    yield "| load | slow replica's share | TTFT mean s, speeds learned | speeds known | ratio |"
    yield "|--:|--:|--:|--:|--:|"
    for row in rows:
        yield f"| {row.load:.0%} | {row.share:.2f} | {row.learned_ttft_s:.3f} | {row.known_ttft_s:.3f} | {row.ratio:.3f} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.unequal", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    text = "\n".join(report([measure(load, options.seed) for load in LOADS], options.seed)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "unequal.md").write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
