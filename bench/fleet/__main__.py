"""Several gateways before one fleet: what sharing brings, what it costs, and what becomes of it when the store fails.

    python -m bench.fleet [--quick] [--report]

Prints tables; --report writes bench/reports/fleet.md. Hits: real traces through one, four and eight gateways and eight
simulated replicas, each request to any gateway, with and without sharing through a real server. Outage: the store is killed in
the middle of a run, and started again. Cost: CPU of all gateways and of the store for a request, shared or not, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.fleet.loads import Session, agent_sessions, conversation
from bench.fleet.stage import Sent, send, staged
from bench.measure.machine import REPORTS, command, versions

SETTINGS = ((1, False), (4, True), (4, False), (8, True), (8, False))


@dataclass(frozen=True, slots=True)
class Plan:
    """requests: of the conversation trace; sessions, turns: of the agents'; rounds: of the cost."""

    requests: int = 2000
    sessions: int = 60
    turns: int = 20
    rounds: int = 3


QUICK = Plan(requests=300, sessions=12, turns=6, rounds=1)


@dataclass(frozen=True, slots=True)
class Load:
    """think_s: from one request of a session to the next. concurrent: sessions."""

    name: str
    sessions: list[Session]
    concurrent: int
    think_s: float


def loads(plan: Plan) -> Iterator[Load]:
    yield Load("conversation", conversation(plan.requests), 8, 0.0)
    yield Load("coding agents", agent_sessions(plan.sessions, plan.turns), 12, 0.2)


async def hits(load: Load, gateways: int, *, shared: bool, folder: Path) -> Sent:
    async with staged(gateways, folder, shared=shared) as (made, _):
        return await send(made.urls, load.sessions, concurrent=load.concurrent, think_s=load.think_s, seed=3)


async def outage(load: Load, folder: Path, *, after_s: float = 3.0, down_s: float = 3.0) -> tuple[Sent, float, float]:
    """(what was sent; when the store was killed, when it was started again)"""
    async with staged(4, folder, shared=True) as (made, store):
        assert store
        begun = asyncio.get_running_loop().time()
        task = asyncio.create_task(send(made.urls, load.sessions, concurrent=load.concurrent, think_s=load.think_s, seed=3))
        await asyncio.sleep(after_s)
        store.kill()
        killed = asyncio.get_running_loop().time() - begun
        await asyncio.sleep(down_s)
        store.start()
        back = asyncio.get_running_loop().time() - begun
        return await task, killed, back


async def cost(load: Load, gateways: int, *, shared: bool, folder: Path) -> tuple[float, float]:
    """CPU of a request, in us: (all gateways, the store)."""
    async with staged(gateways, folder, shared=shared) as (made, store):
        await send(made.urls, load.sessions[:50], concurrent=load.concurrent, think_s=0.0, seed=1)
        before, store_before = made.cpu_s, store.cpu_s if store else 0.0
        sent = await send(made.urls, load.sessions, concurrent=load.concurrent, think_s=0.0, seed=2)
        number = len(sent.hits)
        return (made.cpu_s - before) / number * 1e6, ((store.cpu_s if store else 0.0) - store_before) / number * 1e6


def measured(plan: Plan, show: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show("## Cached tokens of all prompt tokens\n")
        show("| trace | gateways | shared | cached | failed | requests | seconds |\n|---|--:|---|--:|--:|--:|--:|")
        every = list(loads(plan))
        for load in every:
            for gateways, shared in SETTINGS:
                sent = asyncio.run(hits(load, gateways, shared=shared, folder=folder))
                word = "–" if gateways == 1 else "yes" if shared else "no"
                numbers = f"{sent.share():.1%} | {sent.failed} | {len(sent.hits)} | {sent.seconds:.0f}"
                show(f"| {load.name} | {gateways} | {word} | {numbers} |")
        show("\n## The store is killed, and started again (4 gateways)\n")
        sent, killed, back = asyncio.run(outage(every[1], folder))
        show("| | cached |\n|---|--:|")
        parts = (("before", 0.0, killed), ("without it", killed, back), ("after its start", back, float("inf")))
        for word, begin, end in parts:
            show(f"| {word} | {sent.share(begin, end):.1%} |")
        show(f"\n{sent.failed} of {len(sent.hits) + sent.failed} requests failed.")
        show("\n## CPU of a request, us (median of the rounds)\n")
        show("| gateways | shared | gateways' CPU | of not shared | store's CPU |\n|--:|---|--:|--:|--:|")
        for gateways in (1, 4, 8):
            rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(plan.rounds):
                for shared in (False, True):
                    rows[shared].append(asyncio.run(cost(every[0], gateways, shared=shared, folder=folder)))
            base = statistics.median(gateway for gateway, _ in rows[False])
            for shared in (False, True):
                gateway = statistics.median(gateway for gateway, _ in rows[shared])
                store = statistics.median(store for _, store in rows[shared])
                show(f"| {gateways} | {'yes' if shared else 'no'} | {gateway:.0f} | {gateway / base:.2f} | {store:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--report", action="store_true", help="write bench/reports/fleet.md")
    options = parser.parse_args()
    lines = [f"# Several gateways before one fleet\n\n`{command('bench.fleet', sys.argv[1:])}`, {versions()}\n"]

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    measured(QUICK if options.quick else Plan(), show)
    if options.report:
        (REPORTS / "fleet.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
