"""What a front does to several gateways: which turns stay, what is cached, and what nginx costs.

    python -m bench.fronts [--quick] [--report]

Prints tables; --report writes bench/reports/fronts.md. Turns: the agents of `bench/agents/` through one, two and four gateways
behind nginx, by the hash of the session's header and in turn. A gateway knows only what it has sent itself. Cost: plain
requests and streams at mock replicas, through a gateway and through nginx and the same gateway, in alternating rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agents.kinds import KINDS
from bench.agents.run import Plan, Score, run
from bench.fronts.serve import program
from bench.gateway.data_plane import part
from bench.gateway.systems import Running, Setting, System, mocks, started
from bench.measure.cpu import cores, pinned
from bench.measure.load import Closed, Open
from bench.measure.load import command as load_command
from bench.measure.machine import REPORTS, command, versions

SETTINGS = ((1, "session"), (2, "session"), (2, "round_robin"), (4, "session"), (4, "round_robin"))
NAMES = ("messages-claude-code", "responses-list")  # those that send a session's header, as Claude Code and Codex
CHUNKS, STREAMS = 100, 50


@dataclass(frozen=True, slots=True)
class Effort:
    """rounds, requests, seconds: of the cost. rate: streams a second while TTFT is measured."""

    plan: Plan
    rounds: int = 5
    requests: int = 4_000
    seconds: float = 4.0
    rate: float = 20.0


QUICK = Effort(Plan(conversations=12, turns=4, concurrent=6, think_s=0.1), rounds=3, requests=1_000, seconds=2.0)


def fronted(gateways: int, balance: str) -> System:
    def start(at: Setting) -> list[str]:
        own = at.folder / "front"
        own.mkdir(parents=True)
        return [at.program, "-m", "bench.fronts.serve", str(at.port), str(gateways), balance, str(own), *at.urls]

    return System(f"{gateways}, {balance.replace('_', ' ')}", start)


def alone() -> System:
    """A gateway without nginx."""

    def start(at: Setting) -> list[str]:
        replicas = [flag for url in at.urls for flag in ("--replica", url)]
        return [at.program, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", str(at.port), *replicas]

    return System("gateway", start)


def turns(effort: Effort) -> Iterator[Score]:
    with tempfile.TemporaryDirectory() as folder:
        for kind in (kind for kind in KINDS if kind.name in NAMES):
            for number, (gateways, balance) in enumerate(SETTINGS):
                score = run(fronted(gateways, balance), kind, effort.plan, Path(folder) / f"{kind.name}-{number}")
                watch(f"{kind.name}, {score.system}: {score.stay_share:.0%} stay, {score.cached_share:.1%} cached")
                yield score


def behind() -> System:
    """The same gateway behind nginx."""
    return dataclasses.replace(fronted(1, "session"), name="nginx and gateway")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU us of all processes, of a plain request of 2 kB and of a streamed chunk; seconds added to TTFT at the median."""

    request: float
    chunk: float
    ttft: float
    errors: dict[str, int]


def costs(effort: Effort) -> dict[str, list[Cost]]:
    """By system, a cost of each round."""
    system_cores, load_cores = cores()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(mocks(2, 0.01, load_cores))
        systems = [
            stack.enter_context(started(system, urls, folder / str(number), system_cores))
            for number, system in enumerate((alone(), behind()))
        ]
        found: dict[str, list[Cost]] = {each.system.name: [] for each in systems}
        for turn in range(effort.rounds):
            for each in systems if turn % 2 else reversed(systems):
                cost = _cost(each, int(urls[0].rpartition(":")[2]), effort)
                found[each.system.name].append(cost)
                watch(f"{each.system.name}: {cost.request:.0f} us a request, {cost.chunk:.1f} us a chunk")
    return found


def _cost(system: Running, mock: int, effort: Effort) -> Cost:
    pid = system.process.pid
    plain = _load(Closed(system.port, pid, requests=effort.requests, seconds=effort.seconds, warm=effort.requests // 20))
    streams = _load(Closed(system.port, pid, 2000, CHUNKS, STREAMS, STREAMS, effort.seconds, warm=10))
    timed = _load(Open(system.port, mock, effort.rate, effort.rate, effort.seconds))
    through, direct = timed["through"], timed["direct"]
    errors = {reason: count for one in (plain, streams, through) for reason, count in one["errors"].items()}
    first = through.get("first_p50", 0.0) - direct.get("first_p50", 0.0)
    return Cost(part(plain, plain["good"]).each, part(streams, streams["words"]).each, first, errors)


def _load(job: Closed | Open) -> dict[str, Any]:
    with pinned(cores()[1]):
        done = subprocess.run(load_command(job), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def report(made_by: str, plan: Plan, scores: Sequence[Score], found: dict[str, list[Cost]]) -> Iterator[str]:
    yield "# Several gateways behind nginx\n"
    yield f"{made_by}\n"
    yield "## Turns that stay\n"
    yield f"{plan.conversations} conversations of {plan.turns} turns, {plan.concurrent} at a time; {plan.replicas} stand-in"
    yield "replicas. *stay*: later turns that went to the replica of the turn before. *cached*: prompt tokens, as the replicas"
    yield "count them.\n"
    yield "| client | gateways, balance | stay | cached | errors |"
    yield "|---|---|---|---|---|"
    for score in scores:
        stay, cached = f"{score.stay_share:.0%}", f"{score.cached_share:.1%}"
        yield f"| {score.kind} | {score.system} | {stay} | {cached} | {score.errors.total()} |"
    yield "\n## What nginx costs\n"
    (first, base), *_ = found.items() if found else (("", []),)
    yield "CPU of all processes, in the clear, the gateway as plain Python; medians of the rounds, and of their ratios (with"
    yield "the middle half of these). What nginx takes is the difference.\n"
    yield f"| | us a request, 2 kB | to {first} | us a chunk | to {first} | TTFT added, ms |"
    yield "|---|---|---|---|---|---|"
    for name, rounds in found.items():
        requests = beside([one.request for one in rounds], [one.request for one in base])
        chunks = beside([one.chunk for one in rounds], [one.chunk for one in base])
        yield f"| {name} | {requests} | {chunks} | {statistics.median(one.ttft for one in rounds) * 1e3:.2f} |"
    for name, rounds in found.items():
        errors = [one.errors for one in rounds if one.errors]
        if errors:
            yield f"\n**{name} made errors, so its figures do not count: {errors}.**"


def beside(values: Sequence[float], to: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles((value / other for value, other in zip(values, to, strict=True)), n=4)
    return f"{statistics.median(values):.1f} | {middle:.2f} ({low:.2f} to {high:.2f})"


def watch(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fronts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--report", action="store_true", help="write bench/reports/fronts.md")
    options = parser.parse_args(arguments)
    if not program():
        print("nginx is missing: apt-get install nginx-light", file=sys.stderr)
        return 1
    effort = QUICK if options.quick else Effort(Plan())
    scores, found = list(turns(effort)), costs(effort)
    text = "\n".join(report(f"Made by `{command('bench.fronts', arguments)}`: {versions()}.", effort.plan, scores, found))
    if options.report:
        (REPORTS / "fronts.md").write_text(text + "\n", "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
