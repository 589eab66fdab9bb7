"""Several workers: what a request costs as their number grows, and whether they route as well as one.

    python -m bench.gateway.workers [--quick] [--out bench/reports]

Writes workers.md and workers.json. Three parts. Cost on one core: the load and the mock replicas of bench.gateway; all workers
share one core, so that what a request costs is seen, and not how many cores the machine has; systems take turns. Cost on a core
of its own: one of two workers has a core to itself, as each would have where there are enough; the other shares a core with the
load, and has as many requests to answer (`even.py`). Beside them two independent gateways, on the same
cores. Routing: `crowd.py` through simulated replicas, with each request on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gateway.crowd import CrowdResult, crowd
from bench.gateway.data_plane import CHUNKS, INTERVAL_S, STREAMS, LoadResult, part, watch
from bench.gateway.even import Even
from bench.gateway.even import command as even_command
from bench.gateway.systems import Running, mocks, started, with_workers
from bench.measure.cpu import cores, pin, pinned, rss_bytes, tree
from bench.measure.load import Closed, command
from bench.measure.machine import REPORTS, versions
from bench.measure.machine import command as shell_command
from gateway.commands.demo.processes import Process, listening_url, ready_url

NUMBERS = (1, 2, 4)
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
    """CPU us of each round's request (2 kB) and chunk, of a process with a core to itself and its share of a supervisor's."""

    name: str
    requests: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def apart(plan: Plan) -> list[Apart]:
    """Two independent gateways, then two workers of one. Nothing where there is only one core."""
    first, others = cores()
    if first == others:
        return []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, INTERVAL_S, others))
        one, two, both = (
            stack.enter_context(started(with_workers(number), urls, folder / name, others))
            for name, number in (("one", 1), ("two", 1), ("both", 2))
        )
        supervisor, *workers = tree(both.process.pid)
        gateways = [(one.port, one.process.pid), (two.port, two.process.pid)]
        pairs = [
            (Apart("two gateways"), gateways, 0),
            (Apart("two workers"), [(both.port, pid) for pid in workers], supervisor),
        ]
        for _, servers, _ in pairs:
            pin(servers[0][1], first)
        streams = {"connections": STREAMS // 2, "chunks": CHUNKS, "each": 1, "warm": 1}
        for turn in range(9 * plan.rounds):  # short ones: a neighbour of the machine makes one a half dearer, and not the next
            for found, servers, above in reversed(pairs) if turn % 2 else pairs:
                found.requests.append(_even(servers, above, found.errors, each=plan.requests // 40))
                found.chunks.append(_even(servers, above, found.errors, **streams))
        return [found for found, *_ in pairs]


def _even(servers: Sequence[tuple[int, int]], supervisor: int, errors: Counter[str], **load: int) -> float:
    """CPU us of a request or chunk on the first of the servers."""
    pids = [pid for _, pid in servers]
    job = Even(servers, [*pids, supervisor] if supervisor else pids, **load)
    with pinned(cores()[1]):
        done = subprocess.run(even_command(job), stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    errors.update(result["errors"])
    each, above = result["cpu_s"][: len(pids)], result["cpu_s"][len(pids) :]
    own = sum(above) - sum(each) if above else 0.0  # a supervisor's is of all that it started
    units = (result["words"] if job.chunks else result["good"]) / len(pids)
    return (each[0] + own / len(pids)) / units * 1e6 if units else 0.0


def _short(plan: Plan, system: Running) -> LoadResult:
    job = Closed(system.port, system.process.pid, requests=plan.requests, seconds=plan.seconds, warm=plan.requests // 20)
    found = _load(job)
    return part(found, found["good"])


def _chunks(plan: Plan, system: Running) -> LoadResult:
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


def routed(plan: Plan, flags: Sequence[str], seed: int) -> CrowdResult:
    """A crowd through a gateway with these flags."""
    with simulated() as urls:
        replicas = [flag for url in urls for flag in ("--replica", url)]
        gateway = Process("gateway", ["serve", "--port", "0", *flags, *replicas])
        try:
            url = gateway.wait_for(listening_url)
            result = asyncio.run(crowd(url, users=plan.users, requests=plan.asked, seed=seed))
        finally:
            gateway.stop()
    watch(
        f"{' '.join(flags)}, seed {seed}: {result.hit_ratio:.1%} cached, {result.mean_s * 1e3:.0f} ms {result.errors[:1] or ''}"
    )
    return result


def report(
    made_by: str, found: Sequence[Cost], separate: Sequence[Apart], crowds: dict[str, list[CrowdResult]]
) -> Iterator[str]:
    yield "# Workers: several processes as one gateway\n"
    yield f"{made_by}\n"
    yield "## What a request costs\n"
    yield "*scales to*: so many times the requests/s (chunks/s) of one worker, if each has a core of its own."
    yield from apart_table(separate)
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
    for name, results in crowds.items():
        ratio = sum(result.cached_tokens for result in results) / max(1, sum(result.prompt_tokens for result in results))
        each = ", ".join(f"{result.hit_ratio:.1%}" for result in results)
        mean = statistics.mean(result.mean_s for result in results) * 1000
        errors = sum(len(result.errors) for result in results)
        yield f"| {name} | {sum(result.requests for result in results)} | {ratio:.1%} | {each} | {mean:.0f} | {errors} |"


def apart_table(found: Sequence[Apart]) -> Iterator[str]:
    if not found:
        return
    yield "\nOne of two workers, on a core of its own and with half of the supervisor, beside one of two gateways; medians of"
    yield f"{len(found[0].requests)} rounds, and of their ratios (with the middle half of these).\n"
    yield "| | us a request, 2 kB | to separate | scales to | us a chunk | to separate | scales to |"
    yield "|---|---|---|---|---|---|---|"
    for one in found:
        yield f"| {one.name} | {_beside(one.requests, found[0].requests)} | {_beside(one.chunks, found[0].chunks)} |"
    for one in found:
        if one.errors:
            yield f"\n**The {one.name} made errors, so the figures do not count: {dict(one.errors)}.**"


def _beside(values: Sequence[float], to: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles((value / other for value, other in zip(values, to, strict=True)), n=4)
    return f"{statistics.median(values):.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) | {2 / middle:.2f}"


def _ratio(values: Sequence[float], to: Sequence[float]) -> float:
    """The median of the rounds' ratios: a round's systems meet the same machine."""
    return statistics.median(value / other for value, other in zip(values, to, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.workers", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    separate = apart(plan)
    for one in separate:
        request, chunk = statistics.median(one.requests), statistics.median(one.chunks)
        watch(f"{one.name}, apart: {request:.1f} us a request, {chunk:.1f} us a chunk")
    found = costs(plan)
    for cost in found:
        watch(f"{cost.workers} workers: {min(cost.requests):.1f} us a request, {min(cost.chunks):.1f} us a chunk")
    settings = {f"{number} workers": ["--workers", str(number)] for number in NUMBERS} | {
        "1 worker, round robin": ["--policy", "round_robin"]
    }
    crowds = {name: [routed(plan, flags, seed) for seed in range(plan.seeds)] for name, flags in settings.items()}
    made_by = f"Made by `{shell_command('bench.gateway.workers', arguments)}`: {versions()}."
    text = "\n".join(report(made_by, found, separate, crowds))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "workers.md").write_text(text + "\n", "utf-8")
    kept = {
        "made_by": made_by,
        "plan": asdict(plan),
        "apart": [asdict(one) for one in separate],
        "costs": [asdict(cost) for cost in found],
        "crowds": {name: [asdict(result) for result in results] for name, results in crowds.items()},
    }
    (options.out / "workers.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
