"""Several gateways before one fleet: what sharing brings, what it costs, and what becomes of it when the store fails.

    python -m bench.fleet [--quick] [--only hits,outage,cost,restart,rolling] [--report]

Prints tables; --report writes bench/reports/fleet.md, of which it replaces the parts that were run. Hits: real traces through
one, four and eight gateways and eight simulated replicas, each request to any gateway, with and without sharing through a real
server. Outage: the store is killed in the middle of a run, and started again. Cost: CPU of all gateways and of the store for a
request, shared or not, in turns. Restart: of a gateway under warm conversations (`restart.py`). Rolling: all gateways are
restarted in turn under load (`rolling.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.fleet.loads import Session, agent_sessions, conversation
from bench.fleet.restart import CASES, CONVERSATIONS, restart
from bench.fleet.rolling import Scale, Variant, rolling
from bench.fleet.stage import Sent, send, staged
from bench.measure.machine import REPORTS, ROOT, command, versions

SETTINGS = ((1, False), (4, True), (4, False), (8, True), (8, False))


@dataclass(frozen=True, slots=True)
class Plan:
    """requests: of the conversation trace; sessions, turns: of the agents'; rounds: of the cost; calm_s: see `Scale`."""

    requests: int = 2000
    sessions: int = 60
    turns: int = 20
    rounds: int = 3
    calm_s: float = 30.0


QUICK = Plan(requests=300, sessions=12, turns=6, rounds=1, calm_s=5.0)


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


def chart_variant() -> Variant:
    """As the chart has it by default."""
    values = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text("utf-8"))
    limits = values["config"]["limits"]
    return Variant(
        "the chart: preStop, then SIGTERM",
        accept_s=limits["drain_accept_s"],
        pre_stop_s=values["preStopSleepSeconds"],
        grace_s=values["terminationGracePeriodSeconds"],
        drain_s=limits["drain_timeout_s"],
    )


Show = Callable[[str], None]


def show_hits(plan: Plan, folder: Path, show: Show) -> None:
    show("## Cached tokens of all prompt tokens\n")
    show("| trace | gateways | shared | cached | failed | requests | seconds |\n|---|--:|---|--:|--:|--:|--:|")
    for load in loads(plan):
        for gateways, shared in SETTINGS:
            sent = asyncio.run(hits(load, gateways, shared=shared, folder=folder))
            word = "–" if gateways == 1 else "yes" if shared else "no"
            numbers = f"{sent.share():.1%} | {sent.failed.total()} | {len(sent.hits)} | {sent.seconds:.0f}"
            show(f"| {load.name} | {gateways} | {word} | {numbers} |")


def show_outage(plan: Plan, folder: Path, show: Show) -> None:
    show("## The store is killed, and started again (4 gateways)\n")
    sent, killed, back = asyncio.run(outage(list(loads(plan))[1], folder))
    show("| | cached |\n|---|--:|")
    parts = (("before", 0.0, killed), ("without it", killed, back), ("after its start", back, float("inf")))
    for word, begin, end in parts:
        show(f"| {word} | {sent.share(begin, end):.1%} |")
    show(f"\n{sent.failed.total()} of {len(sent.hits) + sent.failed.total()} requests failed.")


def show_cost(plan: Plan, folder: Path, show: Show) -> None:
    show("## CPU of a request, us (median of the rounds)\n")
    show("| gateways | shared | gateways' CPU | of not shared | store's CPU |\n|--:|---|--:|--:|--:|")
    load = next(loads(plan))
    for gateways in (1, 4, 8):
        rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(plan.rounds):
            for shared in (False, True):
                rows[shared].append(asyncio.run(cost(load, gateways, shared=shared, folder=folder)))
        base = statistics.median(gateway for gateway, _ in rows[False])
        for shared in (False, True):
            gateway = statistics.median(gateway for gateway, _ in rows[shared])
            store = statistics.median(store for _, store in rows[shared])
            show(f"| {gateways} | {'yes' if shared else 'no'} | {gateway:.0f} | {gateway / base:.2f} | {store:.0f} |")


def show_restart(_plan: Plan, folder: Path, show: Show) -> None:
    show(f"## A gateway is restarted under {CONVERSATIONS} warm conversations\n")
    show(
        "Cached tokens of all prompt tokens, of one turn of each; turns grow at one rate, so a warm one finds the same share.\n"
    )
    show("| workers | begins with | turn before | next turn | failed | down for, s |\n|--:|---|--:|--:|--:|--:|")
    for case in CASES:
        seen = asyncio.run(restart(case, folder, time.monotonic))
        down = f"{seen.down_s:.1f}" if case.restarted else "–"
        show(f"| {case.workers} | {case.name} | {seen.before:.1%} | {seen.after:.1%} | {sum(seen.failed.values())} | {down} |")


def show_rolling(plan: Plan, folder: Path, show: Show) -> None:
    chart = chart_variant()
    variants = (
        Variant("SIGTERM, nothing accepted afterwards", 0.0),
        Variant("SIGTERM, not shared", chart.accept_s, shared=False),
        Variant("SIGTERM", chart.accept_s),
        chart,
    )
    show("## Rolling restart of 4 gateways behind a Service\n")
    show("Clients know of a gateway's end a second later. Cached tokens, and p99 of the time to the first byte in ms: before,")
    show("during and after the restarts. Longest end: s from the deletion until the process has ended.\n")
    show(
        "| gateways go by | requests | failed | cut | cached | p99 | longest end | killed |\n|---|--:|--:|--:|---|---|--:|--:|"
    )
    for variant in variants:
        seen = asyncio.run(rolling(variant, folder, Scale(calm_s=plan.calm_s)))
        cached = " → ".join(f"{seen.share(begin, end):.1%}" for _, begin, end in seen.phases)
        first = " → ".join(f"{seen.first_s(begin, end, 0.99) * 1000:.0f}" for _, begin, end in seen.phases)
        failed, cut = sum(seen.failed.values()), sum(seen.cut.values())
        requests = len(seen.answered) + failed + cut
        ends = f"{max(seen.ends):.1f} | {seen.killed}"
        show(f"| {variant.name} | {requests} | {failed} | {cut} | {cached} | {first} | {ends} |")


PARTS: Mapping[str, Callable[[Plan, Path, Show], None]] = {
    "hits": show_hits,
    "outage": show_outage,
    "cost": show_cost,
    "restart": show_restart,
    "rolling": show_rolling,
}


def updated(report: str, part: str) -> str:
    """The report with this part in the place of the one with its heading, or at the end."""
    heading = part.partition("\n")[0]
    old = report.split("\n## ")
    parts = [old[0], *(f"## {each}" for each in old[1:])]
    for at, each in enumerate(parts):
        if each.partition("\n")[0] == heading:
            parts[at] = part
            break
    else:
        parts.append(part)
    return "\n".join(each.rstrip("\n") + "\n" for each in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run (default: {','.join(PARTS)})")
    parser.add_argument("--report", action="store_true", help="write what was run into bench/reports/fleet.md")
    options = parser.parse_args()
    names = options.only.split(",")
    about = f"`{command('bench.fleet', sys.argv[1:])}`, {versions()}"
    whole = REPORTS / "fleet.md"
    report = f"# Several gateways before one fleet\n\n{about}\n"
    if set(names) != set(PARTS) and whole.exists():
        report = whole.read_text()
    for name in names:
        lines: list[str] = []

        def show(line: str, lines: list[str] = lines) -> None:
            print(line, flush=True)
            lines.append(line)

        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](QUICK if options.quick else Plan(), Path(folder), show)
        if set(names) != set(PARTS):
            lines += ["", f"By {about}."]
        report = updated(report, "\n".join(lines))
    if options.report:
        whole.write_text(report)


if __name__ == "__main__":
    main()
