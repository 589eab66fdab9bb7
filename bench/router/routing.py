"""Time of a decision: hash the prompt, choose, first token, close; ours, and of alternatives.

    python -m bench.router.routing [--quick] [--only warmroute,dictionaries] [--out bench/reports]

Writes routing.md, routing.json and, if matplotlib is there, routing-growth.png. What is timed: `traffic.py`; against what:
`contestants.py`. Every index is filled with 1,000,000 block credits (summed over replicas: a block that two hold counts twice),
which is also its capacity, so that whatever comes later evicts. On the way there the index of 8 replicas stops at smaller sizes
to be measured, for the growth.

Three sorts of prompts, in turns: `next turn`, a conversation's next (all but its last blocks are held by some replica);
`again`, a prompt that was just sent; `cold`, one of which no replica holds a block.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from bench.measure.machine import REPORTS, command, versions
from bench.router.contestants import BLOCK_BYTES, KINDS, Gorgo, Warmroute, installed
from bench.router.growth import Point, draw
from bench.router.traffic import TURN_BYTES, Fleet, Prompts, Timed, fill

SORTS = ("next turn", "again", "cold")
SIZES = (2_000, 32_000, 128_000)
FLEETS = (8, 64)
GROWTH_SIZES = (2_000, 32_000)
GROWTH_FLEET = 8
FRESH_SHARE = 0.1  # of the index, at most, is what one group of measured conversations brings
GROUP = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. blocks: the index; steps: its sizes on the way; beyond: sizes after it, ours only."""

    blocks: int = 1_000_000
    steps: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000)
    beyond: tuple[int, ...] = (3_000_000,)
    rounds: int = 8
    requests: int = 50  # of each sort in a round, at least
    seed: int = 1


QUICK = Plan(blocks=200_000, steps=(10_000, 50_000), beyond=(), rounds=4, requests=40)


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement, in microseconds. p50: the least of the rounds' medians; p99: of all rounds together.

    held: share of the prompts' tokens that was held where they went. loop: what `fixed_loop` took in the round of the p50.
    """

    contestant: str
    replicas: int
    blocks: int
    size: int
    sort: str
    p50: float
    p99: float
    held: float
    loop: float


def measure(fleet: Fleet, prompts: Prompts, size: int, blocks: int, plan: Plan) -> Iterator[Row]:
    """One row for each sort."""
    group = max(4, min(GROUP, int(blocks * FRESH_SHARE) * BLOCK_BYTES // size))
    rounds: dict[str, list[Timed]] = {sort: [Timed() for _ in range(plan.rounds)] for sort in SORTS}
    loops = []
    for number in range(plan.rounds):
        timed = {sort: rounds[sort][number] for sort in SORTS}
        for _ in range(-(-plan.requests // group)):
            send_group(fleet, prompts, size, group, timed)
        fleet.drain()
        loops.append(fixed_loop())
    for sort, found in rounds.items():
        every = [us for one in found for us in one.us]
        p50, loop = min((statistics.median(one.us), loop) for one, loop in zip(found, loops, strict=True))
        yield Row(
            fleet.contestant.name,
            fleet.replicas,
            blocks,
            size,
            sort,
            p50=p50,
            p99=statistics.quantiles(every, n=100)[98],
            held=statistics.fmean(one.held for one in found),
            loop=loop,
        )


def send_group(fleet: Fleet, prompts: Prompts, size: int, group: int, timed: dict[str, Timed]) -> None:
    """Begin some conversations, untimed; then their next turns, the same again, and as many cold prompts."""
    talks = [prompts.conversation(size) for _ in range(group)]
    for text in talks:
        fleet.send(text[:-TURN_BYTES])
    for sort in ("next turn", "again"):
        for text in prompts.shuffled(talks):
            fleet.send(text, timed[sort])
    for _ in range(group):
        fleet.send(prompts.cold(size), timed["cold"])


def fixed_loop() -> float:
    """Microseconds that the same piece of Python takes now: how fast the machine is just then, beside its neighbours."""
    times = []
    for _ in range(5):
        begun, number = time.perf_counter_ns(), 0
        while number < 10_000:
            number += 1
        times.append((time.perf_counter_ns() - begun) / 1000)
    return statistics.median(times)


def run(name: str, replicas: int, plan: Plan) -> Iterator[Row]:
    """All of a contestant's rows with this number of replicas; with GROWTH_FLEET of them, at all sizes of the index."""
    prompts = Prompts(plan.seed)
    names = [f"http://replica-{index}:8000" for index in range(replicas)]
    fleet = Fleet(KINDS[name](names, random.Random(plan.seed)), replicas, plan.seed)
    grows = replicas == GROWTH_FLEET
    for blocks in (*(plan.steps if grows else ()), plan.blocks, *(plan.beyond if grows and name == Warmroute.name else ())):
        begun = time.monotonic()
        fill(fleet, prompts, blocks)
        filled = time.monotonic()
        for size in SIZES if blocks == plan.blocks else GROWTH_SIZES:
            yield from measure(fleet, prompts, size, blocks, plan)
        spent = f"filled {filled - begun:.1f} s, measured {time.monotonic() - filled:.1f} s"
        watch(f"{name}, {replicas} replicas, {blocks:,} blocks: {spent}")


def watch(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the report


def report(rows: Sequence[Row], plan: Plan, made_by: str, drawn: bool) -> Iterator[str]:
    best = min(row.loop for row in rows)
    yield "# Routing: what a decision costs\n"
    yield f"{made_by}\n"
    yield (
        f"Microseconds for the whole decision (hash, choose, first token, close) over an index of {plan.blocks:,} block credits"
        f" that is full, so that it evicts. p50: the least of {plan.rounds} rounds' medians; p99: of all rounds together."
        f" While it ran, the machine was up to {max(row.loop for row in rows) / best:.1f} times slower than at its best"
        " (*machine*: a fixed loop, beside the round of the p50)."
        " How it is measured, and what the others leave out: [bench/README.md](../README.md).\n"
    )
    for sort in SORTS:
        yield f"## {sort[0].upper()}{sort[1:]}\n"
        yield from table([row for row in rows if row.sort == sort and row.blocks == plan.blocks], best)
        yield ""
    if not any(row.contestant == Gorgo.name for row in rows):
        yield "`gorgo-lb` was not measured: it is not installed here.\n"
    yield "## Growth: next turn, 8 replicas, p50 by the size of the index\n"
    if drawn:
        yield "![p50 over the size of the index](routing-growth.png)\n"
    yield from growth_table([row for row in rows if row.sort == SORTS[0] and row.replicas == GROWTH_FLEET])


def table(rows: Sequence[Row], best_loop: float) -> Iterator[str]:
    yield "| prompt | replicas | | p50 us | p99 us | p50, of ours | held | machine |"
    yield "|--:|--:|---|--:|--:|--:|--:|--:|"
    order = sorted(rows, key=lambda row: (row.size, row.replicas))
    for (size, replicas), found in groupby(order, key=lambda row: (row.size, row.replicas)):
        same = list(found)
        ours = next((row.p50 for row in same if row.contestant == Warmroute.name), None)
        for row in same:
            ratio = f"{row.p50 / ours:.2f}" if ours else ""
            name = f"**{row.contestant}**" if row.contestant == Warmroute.name else row.contestant
            times = f"{row.p50:.1f} | {row.p99:.1f} | {ratio}"
            yield f"| {size // 1000} kB | {replicas} | {name} | {times} | {row.held:.0%} | {row.loop / best_loop:.2f} |"


def growth_table(rows: Sequence[Row]) -> Iterator[str]:
    steps = sorted({row.blocks for row in rows})
    yield f"| prompt | | {' | '.join(f'{blocks:,}' for blocks in steps)} |"
    yield f"|--:|---|{'--:|' * len(steps)}"
    for size in GROWTH_SIZES:
        for name in dict.fromkeys(row.contestant for row in rows):
            p50 = {row.blocks: row.p50 for row in rows if (row.contestant, row.size) == (name, size)}
            cells = " | ".join(f"{p50[blocks]:.1f}" if blocks in p50 else "" for blocks in steps)
            yield f"| {size // 1000} kB | {name} | {cells} |"


def points(rows: Sequence[Row]) -> list[Point]:
    return [
        Point(row.contestant, row.size, row.blocks, row.p50)
        for row in rows
        if row.sort == SORTS[0] and row.replicas == GROWTH_FLEET and row.size in GROWTH_SIZES
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.router.routing", description=__doc__.splitlines()[0])
    known = dict(installed())
    parser.add_argument("--quick", action="store_true", help=f"an index of {QUICK.blocks:,} blocks, fewer rounds")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(known), metavar="A,B", help=f"of {', '.join(known)}"
    )
    parser.add_argument(
        "--replicas", type=lambda text: [int(size) for size in text.split(",")], default=list(FLEETS), metavar="A,B"
    )
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"--only: {unknown[0]!r} is not one of {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None, plan: Plan | None = None) -> None:
    options = parse(arguments)
    plan = plan or (QUICK if options.quick else Plan())
    rows: list[Row] = []
    for name in options.only:
        for replicas in options.replicas:
            rows += run(name, replicas, plan)
            gc.collect()
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = draw(options.out / "routing-growth.png", points(rows))
    libraries = [
        f"{name} {version}" for name, version in installed() if name in options.only and version and name != Warmroute.name
    ]
    made_by = f"Made by `{command('bench.router.routing', arguments)}`: {versions(libraries)}."
    text = "\n".join(report(rows, plan, made_by, drawn))
    (options.out / "routing.md").write_text(text + "\n", "utf-8")
    found = {"made_by": made_by, "plan": asdict(plan), "rows": [asdict(row) for row in rows]}
    (options.out / "routing.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
