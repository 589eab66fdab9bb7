"""Which policy is best, and by how much: every policy, peer's rule and bound on every workload and fleet size.

    python -m bench.router.policies [--workers 8] [--workload chat,rag] [--policy cost,llm_d] [--replicas 8]

Writes bench/reports/policies.md, a table per workload and fleet, and policies.json. Recorded traces are looked for in
$WARMROUTE_TRACES, else in ../shared/traces beside the repository; those that are missing are left out and named. The load on
each replica is the same whatever the fleet: an open trace is replayed faster on a larger one, a closed one has more users and,
where there would not be enough for them, is repeated with sessions of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import math
import multiprocessing
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

from bench.measure.machine import REPORTS, commit, trace_folder
from gateway import __version__
from gateway.commands.simulate import BOUNDS, NAMES, TRACE_HOURS, TRACE_USERS, Workload, replay
from router.simulation.fleet import FleetSpec, Result
from router.simulation.generators import GENERATORS
from router.simulation.workloads import ClosedLoop, OpenLoop, agents, mooncake

FLEETS = (4, 8, 16)
AGENT_SESSIONS_FOR = 8  # replicas; a larger fleet would come to the end of the recording
AGENT_SEEDS = 6
MAX_INPUT = 200_000


@dataclass(frozen=True, slots=True)
class Case:
    """A workload of the report. `load` makes it for (replicas, seed); `seeds`: runs in the average; file: the trace."""

    title: str
    load: Callable[[int, int], Workload]
    kv_tokens: int = 1_000_000
    seeds: int = 1
    file: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    workload: str
    policy: str
    replicas: int
    seed: int


def rows_of(file: str) -> list[dict[str, object]]:
    with gzip.open(trace_folder() / file) as lines:
        return [json.loads(line) for line in lines]


def open_trace(file: str, speed_at_8: float, replicas: int, seed: int) -> Workload:
    source = OpenLoop(mooncake(rows_of(file), random.Random(seed), speed_at_8 * replicas / 8))
    return Workload(lambda: source)


def agent_trace(file: str, replicas: int, seed: int) -> Workload:
    sessions = list(agents(rows_of(file) * math.ceil(replicas / AGENT_SESSIONS_FOR), MAX_INPUT))
    random.Random(seed).shuffle(sessions)
    horizon = TRACE_HOURS * 3600
    return Workload(lambda: ClosedLoop(sessions, TRACE_USERS * replicas, horizon, random.Random(seed)), horizon)


def generated(name: str, replicas: int, seed: int) -> Workload:
    generator = GENERATORS[name]
    return Workload(lambda: generator.source(replicas, random.Random(seed)), generator.hours * 3600)


def cases() -> dict[str, Case]:
    conversation, synthetic = "mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz"
    coding = "claude_code_agentic.jsonl.gz"
    of = functools.partial
    recorded = {
        "conversation": Case("an hour of production chat, twice as fast", of(open_trace, conversation, 2.0), file=conversation),
        "synthetic": Case("long shared documents", of(open_trace, synthetic, 1.0), file=synthetic),
        "agents_1m": Case("coding agents", of(agent_trace, coding), seeds=AGENT_SEEDS, file=coding),
        "agents_250k": Case("coding agents, too little memory", of(agent_trace, coding), 250_000, AGENT_SEEDS, coding),
    }
    return recorded | {f"gen:{name}": Case(f"generator {name}", of(generated, name)) for name in GENERATORS}


# -- running


def run(job: Job) -> tuple[Job, Result]:
    case = cases()[job.workload]
    result, _ = replay(
        job.policy, FleetSpec(job.replicas, case.kv_tokens), loaded(job.workload, job.replicas, job.seed), job.seed
    )
    return job, result


@functools.lru_cache(maxsize=1)
def loaded(workload: str, replicas: int, seed: int) -> Workload:
    """A worker has the jobs of one workload one after the other."""
    return cases()[workload].load(replicas, seed)


def mean(results: Sequence[Result]) -> Result:
    """Field by field, over seeds."""
    first = results[0]
    numbers = {field.name: fmean(getattr(one, field.name) for one in results) for field in fields(Result)[1:]}
    return Result(first.policy, first.replicas, first.kv_tokens, round(numbers["requests"]), *list(numbers.values())[3:])


def measure(jobs: Sequence[Job], workers: int) -> Mapping[tuple[str, int, str], Result]:
    """(workload, replicas, policy) -> its result."""
    found: dict[tuple[str, int, str], list[Result]] = {}
    begun = time.monotonic()
    with multiprocessing.Pool(workers) if workers > 1 else contextlib.nullcontext() as pool:
        done = pool.imap_unordered(run, jobs) if pool else map(run, jobs)
        for number, (job, result) in enumerate(done, 1):
            found.setdefault((job.workload, job.replicas, job.policy), []).append(result)
            if sys.stderr.isatty():
                print(
                    f"\r{number}/{len(jobs)} runs, {time.monotonic() - begun:.0f} s\033[K", end="", file=sys.stderr, flush=True
                )
    return {key: mean(results) for key, results in found.items()}


# -- the report


def report(results: Mapping[tuple[str, int, str], Result], command: str, options: argparse.Namespace) -> Iterator[str]:
    yield "# Policies\n"
    yield (
        f"Made by `{command}`: warmroute {__version__} ({commit()}), Python {platform.python_version()}, seed {options.seed}"
        f" (agents' traces: the mean of {AGENT_SEEDS} seeds). Replicas: 10,000 tokens/s prefill, 50 tokens/s decode for each of"
        " 64 sequences. Sorted by mean TTFT; the best policy in bold; `pooled` and `infinite` are bounds. What is simulated and"
        " what the columns mean: [docs/simulate.md](../../docs/simulate.md); whose rules the others are:"
        " [router/simulation/peers.py](../../router/simulation/peers.py).\n"
    )
    for workload, case in cases().items():
        for replicas in options.replicas:
            rows = [result for (name, size, _), result in results.items() if (name, size) == (workload, replicas)]
            if rows:
                yield f"## {workload}: {case.title}, {replicas} replicas of {case.kv_tokens:,} KV tokens\n"
                yield from table(rows)
                yield ""


def table(rows: Sequence[Result]) -> Iterator[str]:
    pooled = next((row.ttft_mean_s for row in rows if row.policy == "pooled"), None)
    best = min((row.ttft_mean_s for row in rows if row.policy not in BOUNDS), default=None)
    yield "| policy | requests | hits | TTFT mean s | of pooled | p50 | p90 | p99 | e2e mean s | skew |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in sorted(rows, key=lambda row: row.ttft_mean_s):
        name = f"*{row.policy}*" if row.policy in BOUNDS else row.policy
        times = f"{row.ttft_mean_s:.3f}"
        if row.ttft_mean_s == best and row.policy not in BOUNDS:
            name, times = f"**{name}**", f"**{times}**"
        ratio = f"{row.ttft_mean_s / pooled:.2f}" if pooled else ""
        yield (
            f"| {name} | {row.requests} | {row.hit_ratio:.1%} | {times} | {ratio} | {row.ttft_p50_s:.3f} "
            f"| {row.ttft_p90_s:.3f} | {row.ttft_p99_s:.3f} | {row.e2e_mean_s:.2f} | {row.load_skew:.2f} |"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.router.policies", description=__doc__.splitlines()[0])

    def names(flag: str, known: Sequence[str]) -> None:
        def chosen(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
            return text.split(",")

        parser.add_argument(flag, type=chosen, default=list(known), metavar="A,B", help=f"of {', '.join(known)} (default: all)")

    names("--workload", list(cases()))
    names("--policy", NAMES)
    sizes = ",".join(map(str, FLEETS))
    parser.add_argument(
        "--replicas", type=lambda text: [int(size) for size in text.split(",")], default=list(FLEETS), help=f"default: {sizes}"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    known = cases()
    missing = {name for name in options.workload if known[name].file and not (trace_folder() / known[name].file).exists()}
    for name in sorted(missing):
        print(f"{name} is left out: no {trace_folder() / known[name].file}", file=sys.stderr)
    jobs = [
        Job(name, policy, replicas, options.seed + seed)
        for name in options.workload
        if name not in missing
        for replicas in sorted(options.replicas, reverse=True)
        for seed in range(known[name].seeds)
        for policy in options.policy
    ]
    results = measure(jobs, options.workers)
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "bench.router.policies", *(sys.argv[1:] if arguments is None else arguments)])
    text = "\n".join(report(results, command, options))
    (options.out / "policies.md").write_text(text, "utf-8")
    found = [{"workload": workload, **asdict(result)} for (workload, _, _), result in sorted(results.items())]
    (options.out / "policies.json").write_text(json.dumps({"results": found}, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
