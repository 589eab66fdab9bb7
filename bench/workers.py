"""Several workers: what a request costs as their number grows, and whether they route as well as one.

    python -m bench.workers [--quick] [--out bench/reports]

Writes workers.md and workers.json. Three parts. Cost on one core: the load and the mock replicas of bench.gateway; all workers
share one core, so that what a request costs is seen, and not how many cores the machine has; systems take turns, of CPU the
least of the rounds counts. Cost on a core of its own: one worker has a core to itself, as each would have where there are
enough, and as many requests to answer as each of the others, which share the other cores with the load (`even.py`). Routing:
`crowd.py` through simulated replicas, with each request on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cpu import cores, pin, pinned, rss_bytes, tree
from bench.crowd import Told, crowd
from bench.even import Even
from bench.even import command as even_command
from bench.gateway import CHUNKS, INTERVAL_S, STREAMS, Part, part, watch
from bench.load import Closed, command
from bench.machine import command as shell_command
from bench.machine import versions
from bench.policies import REPORTS
from bench.systems import Running, mocks, started, with_workers
from gateway.demo.processes import Process, listening_url, ready_url

NUMBERS = (1, 2, 4)
APART = (1, 2)
REPLICAS = 8
SIMULATED = ("--kv-tokens", "40000", "--prefill-rate", "20000", "--decode-rate", "200")


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds, requests, seconds: of the cost; users, asked: in a crowd; seeds: crowds."""

    rounds: int = 5
    requests: int = 8_000
    seconds: float = 3.0
    users: int = 64
    asked: int = 30
    seeds: int = 3


QUICK = Plan(rounds=2, requests=3_000, seconds=2.0, users=32, asked=12, seeds=1)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU us of each round's request (2 kB) and chunk, over all processes; memory of all."""

    workers: int
    requests: list[float]
    chunks: list[float]
    rate: float
    rss_mb: float
    errors: dict[str, int]


def costs(plan: Plan) -> list[Cost]:
    system_cores, load_cores = cores()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, INTERVAL_S, load_cores))
        running = {
            number: stack.enter_context(started(with_workers(number), urls, folder / str(number), system_cores))
            for number in NUMBERS
        }
        rounds = [[(_short(plan, each), _chunks(plan, each)) for each in running.values()] for _ in range(plan.rounds)]
        return [
            Cost(
                number,
                [turn[place][0].each for turn in rounds],
                [turn[place][1].each for turn in rounds],
                max(turn[place][0].rate for turn in rounds),
                rss_bytes(each.process.pid) / 1e6,
                {reason: count for turn in rounds for one in turn[place] for reason, count in one.errors.items()},
            )
            for place, (number, each) in enumerate(running.items())
        ]


@dataclass(frozen=True, slots=True)
class Apart:
    """CPU us of each round's request (2 kB) and chunk: of a worker with a core to itself, and its share of the supervisor's."""

    workers: int
    requests: list[float]
    chunks: list[float]
    errors: dict[str, int]


def apart(plan: Plan) -> list[Apart]:
    """Nothing where there is only one core."""
    system_cores, load_cores = cores()
    if system_cores == load_cores:
        return []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, INTERVAL_S, load_cores))
        running = {
            number: stack.enter_context(started(with_workers(number), urls, folder / str(number), system_cores))
            for number in APART
        }
        found = [Apart(number, [], [], {}) for number in APART]
        for each in running.values():
            first = _workers(each)[0]
            for pid in set(tree(each.process.pid)) - {first}:
                pin(pid, load_cores)
        for _ in range(plan.rounds):
            for one, each in zip(found, running.values(), strict=True):
                one.requests.append(_even(each, one.errors, each=plan.requests // 20))
                one.chunks.append(_even(each, one.errors, each=2, warm=1, connections=STREAMS // 2, chunks=CHUNKS))
        return found


def _workers(system: Running) -> list[int]:
    """With one there is no supervisor."""
    return tree(system.process.pid)[1:] or [system.process.pid]


def _even(system: Running, errors: dict[str, int], **load: int) -> float:
    """CPU us of a request or chunk."""
    pids = _workers(system)
    job = Even(system.port, pids, [*pids, system.process.pid], **load)
    with pinned(cores()[1]):
        done = subprocess.run(even_command(job), stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    for reason, count in told["errors"].items():
        errors[reason] = errors.get(reason, 0) + count
    *each, whole = told["cpu_s"]
    supervisor = whole - sum(each)
    units = (told["words"] if job.chunks else told["good"]) / len(pids)
    return (each[0] + supervisor / len(pids)) / units * 1e6 if units else 0.0


def _short(plan: Plan, system: Running) -> Part:
    job = Closed(system.port, system.process.pid, requests=plan.requests, seconds=plan.seconds, warm=plan.requests // 20)
    found = _load(job)
    return part(found, found["good"])


def _chunks(plan: Plan, system: Running) -> Part:
    job = Closed(system.port, system.process.pid, 2000, CHUNKS, STREAMS, STREAMS, plan.seconds, warm=10)
    found = _load(job)
    return part(found, found["words"])


def _load(job: Closed) -> dict[str, Any]:
    with pinned(cores()[1]):
        done = subprocess.run(command(job), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def simulated() -> Iterator[list[str]]:
    """Base URLs of replicas with empty caches."""
    with contextlib.ExitStack() as stack:
        arguments = ["replica", "--engine", "sim", "--port", "0", *SIMULATED]
        replicas = [Process(f"replica {number}", arguments) for number in range(REPLICAS)]
        for replica in replicas:
            stack.callback(replica.stop)
        yield [replica.wait_for(ready_url) for replica in replicas]


def routed(plan: Plan, flags: Sequence[str], seed: int) -> Told:
    """A crowd through a gateway with these flags."""
    with simulated() as urls:
        replicas = [flag for url in urls for flag in ("--replica", url)]
        gateway = Process("gateway", ["serve", "--port", "0", *flags, *replicas])
        try:
            url = gateway.wait_for(listening_url)
            told = asyncio.run(crowd(url, users=plan.users, requests=plan.asked, seed=seed))
        finally:
            gateway.stop()
    watch(f"{' '.join(flags)}, seed {seed}: {told.hit_ratio:.1%} cached, {told.mean_s * 1000:.0f} ms {told.errors[:1] or ''}")
    return told


def report(made_by: str, found: Sequence[Cost], single: Sequence[Apart], crowds: dict[str, list[Told]]) -> Iterator[str]:
    yield "# Workers: several processes as one gateway\n"
    yield f"{made_by}\n"
    yield "## What a request costs\n"
    yield "*scales to*: so many times the requests/s (chunks/s) of one worker, if each has a core of its own."
    yield from apart_table(single)
    yield "\nAll workers on one core, and in each other's way in its caches; CPU of all processes, the supervisor's too.\n"
    yield "| workers | us a request, 2 kB | to one worker | scales to | us a chunk | to one worker | memory, MB |"
    yield "|---|---|---|---|---|---|---|"
    one = found[0]
    for cost in found:
        request = _ratio(cost.requests, one.requests)
        chunk = _ratio(cost.chunks, one.chunks)
        scales = cost.workers / request
        costs_us = f"{min(cost.requests):.1f} | {request:.2f} | {scales:.2f} | {min(cost.chunks):.1f} | {chunk:.2f}"
        yield f"| {cost.workers} | {costs_us} | {cost.rss_mb:.0f} |"
    for cost in found:
        if cost.errors:
            yield f"\n**{cost.workers} workers made errors, so the figures do not count: {cost.errors}.**"
    yield "\n## Whether they route as well\n"
    yield f"{REPLICAS} simulated replicas of {SIMULATED[1]} tokens; each request on a connection of its own.\n"
    yield "| | requests | cached | of each crowd | mean time, ms | errors |"
    yield "|---|---|---|---|---|---|"
    for name, tolds in crowds.items():
        ratio = sum(told.cached_tokens for told in tolds) / max(1, sum(told.prompt_tokens for told in tolds))
        each = ", ".join(f"{told.hit_ratio:.1%}" for told in tolds)
        mean = statistics.mean(told.mean_s for told in tolds) * 1000
        errors = sum(len(told.errors) for told in tolds)
        yield f"| {name} | {sum(told.requests for told in tolds)} | {ratio:.1%} | {each} | {mean:.0f} | {errors} |"


def apart_table(single: Sequence[Apart]) -> Iterator[str]:
    if not single:
        return
    yield "\nA worker on a core of its own, with as many requests as each of the others, and its share of the supervisor.\n"
    yield "| workers | us a request, 2 kB | to one worker | scales to | us a chunk | to one worker | scales to |"
    yield "|---|---|---|---|---|---|---|"
    for one in single:
        request, chunk = _ratio(one.requests, single[0].requests), _ratio(one.chunks, single[0].chunks)
        requests = f"{min(one.requests):.1f} | {request:.2f} | {one.workers / request:.2f}"
        yield f"| {one.workers} | {requests} | {min(one.chunks):.1f} | {chunk:.2f} | {one.workers / chunk:.2f} |"
        if one.errors:
            yield f"\n**{one.workers} workers made errors, so the figures do not count: {one.errors}.**\n"


def _ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median of the rounds' ratios: a round's systems meet the same machine."""
    return statistics.median(value / other for value, other in zip(values, to, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    single = apart(plan)
    for one in single:
        watch(f"{one.workers} workers, apart: {min(one.requests):.1f} us a request, {min(one.chunks):.1f} us a chunk")
    found = costs(plan)
    for cost in found:
        watch(f"{cost.workers} workers: {min(cost.requests):.1f} us a request, {min(cost.chunks):.1f} us a chunk")
    settings = {f"{number} workers": ["--workers", str(number)] for number in NUMBERS} | {
        "1 worker, round robin": ["--policy", "round_robin"]
    }
    crowds = {name: [routed(plan, flags, seed) for seed in range(plan.seeds)] for name, flags in settings.items()}
    made_by = f"Made by `{shell_command('bench.workers', arguments)}`: {versions()}."
    text = "\n".join(report(made_by, found, single, crowds))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "workers.md").write_text(text + "\n", "utf-8")
    kept = {
        "made_by": made_by,
        "plan": asdict(plan),
        "apart": [asdict(one) for one in single],
        "costs": [asdict(cost) for cost in found],
        "crowds": {name: [asdict(told) for told in tolds] for name, tolds in crowds.items()},
    }
    (options.out / "workers.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
