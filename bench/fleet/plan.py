"""A plan for 1,000 replicas and 100 gateways: what one such fleet would cost, and ten fleets of a tenth, from measured figures.

    python -m bench.fleet.plan [--quick] [--report]

Prints tables; --report writes bench/reports/plan.md. Placement: the production routers in the simulator, 1,000 replicas with
one gateway, with a hundred that share (after the delay that so many have) or do not, and a tenth of it. Exchange: what a
decision costs a gateway that follows it, and the store that hands it out. The sum: both, at RATE.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bench.fleet.exchange import Decision, following, handing_out
from bench.measure.machine import REPORTS, command, versions
from gateway.cluster.replication import BATCH_S, pause_s
from gateway.commands.simulate import Fronts, Workload, replay
from router.simulation.fleet import FleetSpec, Result
from router.simulation.generators import ChatWorkload, Lengths
from router.simulation.workloads import WorkloadSource

CHAT = ChatWorkload(hours=0.04, users=16, system=6000, message=Lengths(4800, 1.0, 60_000), pause_s=20.0)
REPLICA = FleetSpec(prefill_rate=5_000.0)
RATE = 1.0  # requests/s of a replica
BLOCKS = 60, 470  # prompts of 7,700 and of 60,000 tokens


@dataclass(frozen=True, slots=True)
class Fleet:
    replicas: int
    gateways: int
    shared: bool = True

    @property
    def delay_s(self) -> float:
        """Until the others know of a decision: a batch of the router, then one of the link, which another link reads."""
        return BATCH_S + pause_s(self.gateways - 1) if self.shared else math.inf

    def __str__(self) -> str:
        return f"{self.replicas:,} | {self.gateways} | {'–' if self.gateways == 1 else 'yes' if self.shared else 'no'}"


WHOLE, TENTH = Fleet(1000, 100), Fleet(100, 10)
QUICK = Fleet(40, 8), Fleet(10, 2)


def simulated(fleet: Fleet, chat: ChatWorkload) -> Result:
    def source() -> WorkloadSource:
        return chat.source(fleet.replicas, random.Random(0))

    spec = replace(REPLICA, replicas=fleet.replicas)
    fronts = Fronts(fleet.gateways, fleet.delay_s)
    result, _ = replay("cost", spec, Workload(source, chat.hours * 3600), 0, fronts)
    return result


def placement(fleets: list[Fleet], chat: ChatWorkload, show: Callable[[str], None]) -> None:
    show("## Placement: conversations of some 20,000 tokens\n")
    show("| replicas | gateways | shared | delay s | requests | hits | TTFT mean s | p50 | p90 | p99 | skew |")
    show("|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    with ProcessPoolExecutor(2) as pool:
        for fleet, one in zip(fleets, pool.map(simulated, fleets, [chat] * len(fleets)), strict=True):
            delay = f"{fleet.delay_s:.3f}" if fleet.shared and fleet.gateways > 1 else "–"
            times = " | ".join(f"{each:.2f}" for each in (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s))
            show(f"| {fleet} | {delay} | {one.requests:,} | {one.hit_ratio:.1%} | {times} | {one.load_skew:.2f} |")


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of CPU. follow_s: of a decision, by (replicas, blocks). The store's: of a write, of a read, and of each entry and
    each byte that a read returns.
    """

    follow_s: dict[tuple[int, int], float]
    write_s: float
    read_s: float
    entry_s: float
    byte_s: float


def exchange(replicas: list[int], rounds: int, show: Callable[[str], None]) -> Prices:
    show("\n## Exchange: a gateway follows a decision of another\n")
    show("| replicas | prompt, blocks | bytes | us, alone in its envelope | us, one of 20 |\n|--:|--:|--:|--:|--:|")
    follow_s: dict[tuple[int, int], float] = {}
    for number in replicas:
        for blocks in BLOCKS:
            decision = Decision(blocks)
            alone, many = (following(number, decision, each, envelopes=8 * rounds) * 1e6 for each in (1, 20))
            follow_s[number, blocks] = many / 1e6
            show(f"| {number:,} | {blocks} | {decision.bytes:,} | {alone:.0f} | {many:.0f} |")
    show("\n## Exchange: the store hands out entries\n")
    show("| readers | entries of a read | bytes of each | us of the store's CPU |\n|--:|--:|--:|--:|")
    cost: dict[tuple[int, int, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in ((1, 1, 1_000), (41, 1, 1_000), (41, 100, 1_000), (41, 100, 16_000), (1, 100, 1_000)):
            cost[shape] = asyncio.run(handing_out(*shape, Path(folder), rounds=rounds))
            readers, entries, size = shape
            show(f"| {readers} | {entries} | {size:,} | {cost[shape] * 1e6:,.0f} |")
    read_s = (cost[41, 1, 1_000] - cost[1, 1, 1_000]) / 40
    entry_s = ((cost[41, 100, 1_000] - cost[1, 100, 1_000]) / 40 - read_s) / 99
    byte_s = (cost[41, 100, 16_000] - cost[41, 100, 1_000]) / 41 / 100 / 15_000
    prices = Prices(follow_s, cost[1, 1, 1_000] - read_s, read_s, entry_s, byte_s)
    read = f"{read_s * 1e6:.0f} us to read, {entry_s * 1e6:.1f} us for each entry more and {byte_s * 1e9:.2f} ns for each byte"
    show(f"\nSo {prices.write_s * 1e6:.0f} us to write an entry, {read}.")
    return prices


def total(fleets: list[Fleet], prices: Prices, show: Callable[[str], None]) -> None:
    show(f"\n## The sum, at {RATE:g} requests/s for each replica\n")
    names = "a gateway: follows, of a core", "reads, MB/s", "the store: writes/s", "entries/s", "MB/s", "of a core"
    show(f"| replicas | gateways | prompt, blocks | {' | '.join(names)} |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for fleet in fleets:
        for blocks in BLOCKS:
            decisions = fleet.replicas * RATE
            follows = decisions * prices.follow_s[fleet.replicas, blocks]
            reads_bytes = decisions * Decision(blocks).bytes
            writes = fleet.gateways / pause_s(fleet.gateways - 1)  # and as many reads
            entries, sent = writes * fleet.gateways, reads_bytes * fleet.gateways
            store = writes * (prices.write_s + prices.read_s) + entries * prices.entry_s + sent * prices.byte_s
            row = f"{follows:.1%} | {reads_bytes / 1e6:.1f} | {writes:,.0f} | {entries:,.0f} | {sent / 1e6:,.0f} | {store:.0%}"
            show(f"| {fleet.replicas:,} | {fleet.gateways} | {blocks} | {row} |")


def measured(whole: Fleet, tenth: Fleet, chat: ChatWorkload, rounds: int, show: Callable[[str], None]) -> None:
    each = [(replace(fleet, gateways=1), fleet, replace(fleet, shared=False)) for fleet in (tenth, whole)]
    placement([one for row in each for one in row], chat, show)
    prices = exchange([tenth.replicas, whole.replicas], rounds, show)
    total([tenth, whole], prices, show)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small fleet, to see that it runs")
    parser.add_argument("--report", action="store_true", help="write bench/reports/plan.md")
    options = parser.parse_args()
    lines = [f"# 1,000 replicas and 100 gateways\n\n`{command('bench.fleet.plan', sys.argv[1:])}`, {versions()}\n"]

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    whole, tenth = QUICK if options.quick else (WHOLE, TENTH)
    chat, rounds = (replace(CHAT, hours=0.02), 5) if options.quick else (CHAT, 50)
    measured(whole, tenth, chat, rounds, show)
    if options.report:
        (REPORTS / "plan.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
