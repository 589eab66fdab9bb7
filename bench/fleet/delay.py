"""What the delay of sharing costs: 100 replicas behind 10 gateways that know of each other's decisions sooner or later.

    python -m bench.fleet.delay [--quick] [--report]

Prints a table; --report writes bench/reports/sharing-delay.md. The same load and the same simulator as in `plan.py`. Unseen:
the requests that all gateways decide before they know of one of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from bench.fleet.plan import CHAT, QUICK, REPLICA, TENTH, Fleet
from bench.measure.machine import REPORTS, command, versions
from gateway.commands.simulate import ONE, Fronts, Workload, replay
from router.simulation.fleet import Result
from router.simulation.generators import Chat
from router.simulation.workloads import Source

DELAYS_S = 0.02, 0.042, 0.082, 0.165, 0.33, 0.5


def simulated(fleet: Fleet, chat: Chat, fronts: Fronts) -> Result:
    def source() -> Source:
        return chat.source(fleet.replicas, random.Random(0))

    result, _ = replay("cost", replace(REPLICA, replicas=fleet.replicas), Workload(source, chat.hours * 3600), 0, fronts)
    return result


def measured(fleet: Fleet, chat: Chat, delays_s: Sequence[float], show: Callable[[str], None]) -> None:
    fronts = [ONE, *(Fronts(fleet.gateways, delay_s) for delay_s in delays_s)]
    show(f"{fleet.replicas} replicas, {fleet.gateways} gateways (the first row: one), conversations of some 20,000 tokens\n")
    show("| delay s | requests/s | unseen | hits | TTFT mean s | longer by | p50 | p99 |\n|--:|--:|--:|--:|--:|--:|--:|--:|")
    first: Result | None = None
    with ProcessPoolExecutor(2) as pool:
        for front, one in zip(fronts, pool.map(simulated, [fleet] * len(fronts), [chat] * len(fronts), fronts), strict=True):
            rate = one.requests / (chat.hours * 3600)
            delay, unseen, longer = "–", "–", "–"
            if first:
                delay, unseen = f"{front.delay_s:.3f}", f"{rate * front.delay_s:.1f}"
                longer = f"{one.ttft_mean_s / first.ttft_mean_s - 1:.0%}"
            times = f"{one.ttft_mean_s:.2f} | {longer} | {one.ttft_p50_s:.2f} | {one.ttft_p99_s:.2f}"
            show(f"| {delay} | {rate:.0f} | {unseen} | {one.hit_ratio:.1%} | {times} |")
            first = first or one


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small fleet, to see that it runs")
    parser.add_argument("--report", action="store_true", help="write bench/reports/sharing-delay.md")
    options = parser.parse_args()
    lines = [f"# What the delay of sharing costs\n\n`{command('bench.fleet.delay', sys.argv[1:])}`, {versions()}\n"]

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    fleet, chat, delays_s = (QUICK[1], replace(CHAT, hours=0.02), DELAYS_S[-1:]) if options.quick else (TENTH, CHAT, DELAYS_S)
    measured(fleet, chat, delays_s, show)
    if options.report:
        (REPORTS / "sharing-delay.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
