"""Sub-agents that begin at once with one cold head: what is computed, and how long they wait.

    python -m bench.router.bursts [--live] [--before FOLDER] [--out bench/reports]

Every burst has a head of its own, which no replica holds; its requests arrive within 10 ms, each with a task of its own behind
the head. Rows: the gateway's policy as it is, the same without any wait in the gateway, for a lead (`router/leading.py`) or in
line (`router/late.py`), and the rules of other routers, on the same state, over engines that share prefixes in flight and over
engines that do not. --live: also through real gateways to simulated replicas (`bench/agents/bursts.py`). --before: the sources
of an earlier version, for --live.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.agents import bursts as live_bursts
from bench.measure.machine import REPORTS, commit
from bench.router.ablation import FirstCome
from gateway.config.schema import RoutingConfig
from router import Router
from router.simulation.fleet import FleetSpec, RouterPlacement, Simulation, summary
from router.simulation.generators import Lengths, Text
from router.simulation.policies import SIMULATED
from router.simulation.workloads import OpenLoop, SimulatedRequest

HEAD, TASK, OUTPUT = 8000, Lengths(600, most=4000), Lengths(150, most=1000)
BURSTS, SPREAD_S = 150, 0.01
SIZES = {6: 1.5, 20: 4.0}  # agents of a burst -> mean seconds between bursts
RULES = (("cost", True), ("cost", False), ("sglang", False), ("llm_d", False), ("least_loaded", False))


class Row(NamedTuple):
    """computed: tokens. Times in seconds."""

    title: str
    computed: int
    ttft_mean_s: float
    ttft_p99_s: float


def arrivals(agents: int, seed: int, bursts: int) -> Iterator[tuple[float, SimulatedRequest]]:
    chance, now = random.Random(seed), 0.0
    for burst in range(bursts):
        now += chance.expovariate(1 / SIZES[agents])
        head = Text().then(f"head {burst}", HEAD)
        for at in sorted(chance.uniform(0, SPREAD_S) for _ in range(agents)):
            task = head.then(f"task {burst} {at}", TASK.draw(chance))
            yield now + at, task.request(OUTPUT.draw(chance), f"agent {burst} {at}")


def run(agents: int, policy: str, seed: int, *, apart: bool, waits: bool, bursts: int = BURSTS) -> Row:
    spec, routing = FleetSpec(apart=apart, waits=waits), RoutingConfig()
    kind = Router if waits else FirstCome
    router = kind(
        policy=policy,
        ttl_s=routing.ttl_s,
        memory_bytes=routing.memory_mb << 20,
        chance=random.Random(seed),
        policies=SIMULATED,
    )
    simulation = Simulation(
        spec, OpenLoop(sorted(arrivals(agents, seed, bursts), key=lambda row: row[0])), RouterPlacement(router, spec)
    )
    served = list(simulation.run())
    result = summary(policy, spec, served, simulation.busy_s)
    computed = sum(one.request.tokens - one.cached_tokens for one in served)
    title = policy if waits or policy != "cost" else "cost, nobody waits"
    return Row(title, computed, result.ttft_mean_s, result.ttft_p99_s)


def report(seed: int) -> Iterator[str]:
    yield "# Cold bursts\n"
    yield (
        f"Made by `python -m bench.router.bursts`: {commit()}, Python {platform.python_version()}, seed {seed}. 8 simulated"
        f" replicas of 10,000 tokens/s, {BURSTS} bursts: a cold head of {HEAD:,} tokens, and 600 for each agent's task."
        " `sglang` is the rule of SMG, too. *apart*: the engine looks a prompt up when it arrives, and finds it once it is"
        " computed.\n"
    )
    for agents, gap_s in SIZES.items():
        yield f"## {agents} at once, a burst in {gap_s:g} s\n"
        yield "| engine | policy | computed tokens | TTFT mean s | p99 |"
        yield "|---|---|--:|--:|--:|"
        for apart in (True, False):
            for policy, waits in RULES:
                row = run(agents, policy, seed, apart=apart, waits=waits)
                engine = "apart" if apart else "shares in flight"
                yield f"| {engine} | {row.title} | {row.computed:,} | {row.ttft_mean_s:.2f} | {row.ttft_p99_s:.2f} |"
        yield ""


def live(before: Path | None, seed: int) -> Iterator[str]:
    replicas = f"{live_bursts.REPLICAS} `warmroute replica --engine sim` of {live_bursts.RATE:,} tokens/s"
    yield "## Real programs\n"
    yield (
        f"By `--live --before FOLDER`. {replicas}, one prefill after the other, and {live_bursts.ROUNDS} bursts through each"
        " gateway, in turns. *llamacpp*: `--slots`, so that a prefix is found when its request has ended, and Warmroute is told"
        " that it is llama.cpp. *warmroute*: prefixes in flight are shared. All replicas are idle before a burst, so a head on"
        " each costs tokens, and little time.\n"
    )
    yield "| engine | agents | gateway | computed tokens | TTFT mean s | longest |"
    yield "|---|--:|---|--:|--:|--:|"
    yield from live_bursts.rows(before, seed)
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description="What cold bursts cost.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=REPORTS)
    parser.add_argument("--live", action="store_true", help="also through real gateways")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="the sources of an earlier version, for --live")
    options = parser.parse_args()
    text = "\n".join([*report(options.seed), *(live(options.before, options.seed) if options.live else ())])
    (options.out / "bursts.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
