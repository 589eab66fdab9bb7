"""Memory of the index: bytes per block on real traffic, and whether the bound holds against adversarial prompts.

    python -m bench.router.memory [--workers 2] [--out bench/reports]

Writes memory.md and memory.json. The traffic is the conversation trace (bench/measure/machine.py has its places),
twice as fast, on 8 replicas of 1,000,000 KV tokens; the generator `chat` where there is no trace. The trace names blocks of 512
tokens; for the gateway's 64 each of them is taken for 8, and the rest of a prompt that fills no block of 512 is left out.

Every measurement has a process of its own. tracemalloc counts all that is alive after the last request was sent: the whole
`Router` (trie, holds, use lists, ledger, evidence, rents) and what is in flight. RSS is the growth of another process that does
the same without tracemalloc; it also has what the allocator did not give back.
"""

from __future__ import annotations

import argparse
import functools
import gc
import gzip
import json
import math
import multiprocessing
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.measure.machine import REPORTS, command, trace_folder, versions
from bench.router.adversary import ADVERSARIES
from bench.router.contestants import KINDS, BlockDicts, PlainPygtrie, Warmroute
from bench.router.replay import Replay
from router import Outcome, Prompt, Replica, Router
from router.simulation.generators import GENERATORS
from router.simulation.workloads import OpenLoop, Row, WorkloadSource, mooncake
from router.types import KEY_BYTES

TRACE, SPEED = "mooncake_conversation.jsonl.gz", 2.0
REPLICAS, KV_TOKENS = 8, 1_000_000
BLOCKS = (64, 512)  # tokens
BOUND = 16 << 20
FULL = 0.9
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


@dataclass(frozen=True, slots=True)
class Job:
    """contestant: one of KINDS, on the trace; or an adversary of the router, with the bound. limit: of prompts; 0: none."""

    contestant: str = Warmroute.name
    block: int = 64
    adversary: str = ""
    tool: str = "tracemalloc"
    limit: int = 0
    bound: int = BOUND


@dataclass(frozen=True, slots=True)
class Found:
    """bytes: alive at the end; peak: at any time; estimate: the trie's own. Bytes, and 0 where unknown."""

    requests: int
    credits: int
    distinct: int
    bytes: int
    peak: int = 0
    estimate: int = 0
    evicted: int = 0


# -- measuring


def run(job: Job) -> tuple[Job, Found]:
    return job, against(job) if job.adversary else traffic(job)


def traffic(job: Job) -> Found:
    source = load()
    names = [f"http://replica-{index}:8000" for index in range(REPLICAS)]
    contestant: Any = Warmroute(names, random.Random(0), job.block) if job.contestant == Warmroute.name else None
    contestant = contestant or KINDS[job.contestant](names, random.Random(0))
    room = KV_TOKENS // job.block * REPLICAS
    replay = Replay(contestant, source, functools.partial(in_blocks, block=job.block))
    with Watch(job.tool) as watch:
        contestant.grow(room)
        # The others are slow under tracemalloc, and one never forgets: they are stopped when about as much is credited.
        # Ours gets the whole trace; it has more than the room only for prompts that are not computed yet.
        enough = math.inf if job.contestant == Warmroute.name else room * FULL
        while (not job.limit or replay.sent < job.limit) and contestant.blocks <= enough and replay.step():
            pass
    return described(contestant, replay.sent, watch)


def described(contestant: Any, sent: int, watch: Watch) -> Found:
    found = Found(sent, contestant.blocks, distinct(contestant), watch.grown, watch.peak)
    if isinstance(contestant, Warmroute):
        return replace(found, estimate=contestant.router.trie.size_bytes)
    return found


def distinct(contestant: Any) -> int:
    """Distinct blocks with a holder."""
    if isinstance(contestant, Warmroute):
        return contestant.router.trie._edge_bytes // KEY_BYTES
    return len(contestant.holders if isinstance(contestant, BlockDicts) else contestant.trie)


def against(job: Job) -> Found:
    """The router under an adversary that sends one prompt after the other to replicas of unknown size."""
    chance, adversary = random.Random(0), ADVERSARIES[job.adversary]
    prompts, names = adversary.prompts(chance), [f"http://replica-{index}:8000" for index in range(REPLICAS)]
    with Watch(job.tool) as watch:
        router = Router(policy="cost", ttl_s=1e9, memory_bytes=job.bound, chance=chance)
        for name in names:
            router.add(Replica(name))
        count = job.limit or adversary.count
        for number in range(count):
            keys = next(prompts)
            prompt = Prompt(keys, len(keys) // KEY_BYTES * job.block, job.block, "")
            booking = router.choose(prompt, names, float(number))
            booking.first_token(number + 0.1)
            booking.close(Outcome(True, prompt.units, booking.chosen.matched_tokens), number + 0.2)
        del booking, prompt, keys
    trie = router.trie
    return Found(
        count, trie.blocks, trie._edge_bytes // KEY_BYTES, watch.grown, watch.peak, trie.size_bytes, trie.evicted["memory"]
    )


class Watch:
    """What this process has grown by inside of the `with`: by tracemalloc, or its resident set (0 where that is not known)."""

    def __init__(self, tool: str) -> None:
        self._traced = tool == "tracemalloc"
        self._before = self.grown = self.peak = 0

    def __enter__(self) -> Watch:
        gc.collect()
        if self._traced:
            tracemalloc.start()
        else:
            self._before = resident()
        return self

    def __exit__(self, *failure: object) -> None:
        gc.collect()
        if self._traced:
            self.grown, self.peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        else:
            self.grown = resident() - self._before


def resident() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text("ascii").split()[1]) * PAGE if statm.exists() else 0


# -- traffic


def load() -> WorkloadSource:
    if (trace_folder() / TRACE).exists():
        return OpenLoop(mooncake(rows(), random.Random(0), SPEED))
    return GENERATORS["chat"].source(REPLICAS, random.Random(0))


def rows() -> Iterator[Row]:
    """One line at a time: what a whole trace's rows leave free would be filled again, and RSS would not show it."""
    with gzip.open(trace_folder() / TRACE) as lines:
        yield from map(json.loads, lines)


def in_blocks(prompt: Prompt, block: int) -> Prompt:
    """The same prompt in blocks of another length, with keys of its own (not the bytes of the trace)."""
    size = KEY_BYTES
    keys = [prompt.keys[at : at + size] for at in range(0, len(prompt.keys), size)]
    if block < prompt.block_units:
        parts = prompt.block_units // block
        keys = [
            (int.from_bytes(key, "little") * parts + part).to_bytes(size, "little") for key in keys for part in range(parts)
        ]
    else:
        parts = block // prompt.block_units
        keys = keys[parts - 1 :: parts]
    return Prompt(b"".join([*keys, b""]), prompt.units, block, prompt.scale, prompt.session)


# -- the report


def jobs() -> Iterator[Job]:
    for tool in ("tracemalloc", "rss"):
        for block in BLOCKS:
            for name in (Warmroute.name, BlockDicts.name, PlainPygtrie.name):
                yield Job(name, block, tool=tool)
        for adversary in ADVERSARIES:
            yield Job(adversary=adversary, tool=tool)


def report(found: dict[Job, Found], made_by: str) -> Iterator[str]:
    yield "# Memory: what remembering costs\n"
    yield f"{made_by}\n"
    source = TRACE if (trace_folder() / TRACE).exists() else "the generator `chat`, for there is no trace here"
    yield (
        f"## Bytes per block: {source}, {REPLICAS} replicas of {KV_TOKENS:,} KV tokens\n\n"
        "Everything counts, in-flight requests too. credit: a block on a replica; distinct: a block on any. How it is measured:"
        " [bench/README.md](../README.md).\n"
    )
    yield from traffic_table(found)
    yield ""
    bounds = {job.bound for job in found if job.adversary}
    for bound in sorted(bounds):
        yield f"## The bound of {bound >> 20} MiB under adversarial prompts, {REPLICAS} replicas\n"
        yield from bound_table({job: one for job, one in found.items() if job.bound == bound})


def traffic_table(found: dict[Job, Found]) -> Iterator[str]:
    yield "| block | | requests | credits | distinct | MB | bytes/credit | bytes/distinct | RSS/credit | estimate/measured |"
    yield "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for job, one in found.items():
        if job.adversary or job.tool != "tracemalloc":
            continue
        rss = found.get(replace(job, tool="rss"))
        name = f"**{job.contestant}**" if job.contestant == Warmroute.name else job.contestant
        yield (
            f"| {job.block} | {name} | {one.requests:,} | {one.credits:,} | {one.distinct:,} | {one.bytes / 1e6:.2f} "
            f"| {one.bytes / one.credits:.1f} | {one.bytes / one.distinct:.1f} "
            f"| {f'{rss.bytes / rss.credits:.1f}' if rss and rss.bytes else ''} "
            f"| {f'{one.estimate / one.bytes:.2f}' if one.estimate else ''} |"
        )


def bound_table(found: dict[Job, Found]) -> Iterator[str]:
    yield "| prompts | sent | forgotten | credits | peak MiB | peak/bound | RSS MiB | at the end MiB | estimate MiB |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for job, one in found.items():
        if not job.adversary or job.tool != "tracemalloc":
            continue
        rss = found.get(replace(job, tool="rss"))
        title = ADVERSARIES[job.adversary].title
        yield (
            f"| {title} | {one.requests:,} | {one.evicted:,} | {one.credits:,} | {one.peak / 2**20:.2f} "
            f"| {one.peak / job.bound:.0%} | {f'{rss.bytes / 2**20:.2f}' if rss and rss.bytes else ''} "
            f"| {one.bytes / 2**20:.2f} | {one.estimate / 2**20:.2f} |"
        )


def measure(wanted: Sequence[Job], workers: int, of: Callable[[Job], tuple[Job, Found]] = run) -> dict[Job, Found]:
    """In a process for each; in this one if workers is 0."""
    if not workers:
        return dict(map(of, wanted))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        return dict(pool.imap(of, wanted, chunksize=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.router.memory", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="processes at a time (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, wanted: Sequence[Job] | None = None) -> None:
    options = parse(arguments)
    found = measure(list(jobs()) if wanted is None else wanted, options.workers)
    made_by = f"Made by `{command('bench.router.memory', arguments)}`: {versions(['pygtrie ' + version_of('pygtrie')])}."
    options.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(report(found, made_by))
    (options.out / "memory.md").write_text(text + "\n", "utf-8")
    rows = [asdict(job) | asdict(one) for job, one in found.items()]
    (options.out / "memory.json").write_text(json.dumps({"made_by": made_by, "rows": rows}, indent=1) + "\n", "utf-8")
    print(text)


def version_of(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


if __name__ == "__main__":
    main()
