"""A simulated twin beside its original: the same trace, at the same time, how long the first tokens take.

    python -m bench.twin [--seconds 150] [--loads 0.3,0.6,0.85] [--out bench/reports]

The real replica (SmolLM2, one thread) has a core of its own; it is measured with `warmroute replica fit`, and the twin is
started with the flags that this prints. Then both get the same requests at the same moments: the twin sleeps where the other
computes, so it and the load share the other core. Which trace: `twin_traces.py`. The load is what share of the time
the fitted engine would be busy; the table also has that of the real one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import torch
import transformers

from bench.cpu import cores, cpu_seconds, pinned
from bench.machine import command, versions
from bench.policies import REPORTS
from bench.twin_traces import Arrival, at_load, chat, first_tokens, mooncake
from gateway.demo.processes import Process, ready_url
from replica.fit import command_of, errors_of, flags_of
from replica.fit_measure import Measurer
from replica.fit_solve import solve
from replica.sim_cost import SimConfig

TRACES = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[2] / "shared" / "traces")
MOONCAKE = "mooncake_conversation.jsonl.gz"
HALF_S = 1800.0
SLIGHTLY = 0.03
REAL = ["replica", "--threads", "1", "--port", "0"]


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when it was due, seconds to its first token and to its last; tokens of its prompt, cached ones."""

    at: float
    ttft: float
    e2e: float
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Run:
    """One trace at one load. twin_cpu: seconds that the twin's process worked. faster, slower: seconds to the first token, on
    average, of a twin whose costs are all SLIGHTLY less, or more."""

    trace: str
    load: float
    seconds: float
    real: list[Served]
    twin: list[Served]
    twin_cpu: float
    faster: float
    slower: float


@contextmanager
def replica(arguments: Sequence[str], name: str, on: set[int]) -> Iterator[tuple[str, Process]]:
    """A replica's URL, and its process."""
    with pinned(on):
        process = Process(name, list(arguments))
    try:
        yield process.wait_for(ready_url), process
    finally:
        process.stop()


async def replay(urls: Sequence[str], arrivals: Sequence[Arrival]) -> list[list[Served]]:
    """Send all to each, when they are due; both begin with empty caches."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as http:
        for url in urls:
            async with http.post(url + "/reset_prefix_cache") as response:
                assert (await response.json())["success"], "requests are still running"
        begun, tasks = time.monotonic(), list[asyncio.Task[Served]]()
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
            tasks += [asyncio.create_task(_ask(http, url, arrival)) for url in urls]
        served = await asyncio.gather(*tasks)
    return [list(served[at :: len(urls)]) for at in range(len(urls))]


async def _ask(http: aiohttp.ClientSession, url: str, arrival: Arrival) -> Served:
    body = {"prompt": arrival.prompt, "max_tokens": arrival.output, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    sent, first, usage = time.monotonic(), 0.0, None
    async with http.post(url + "/v1/completions", json=body | stream) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first = first or time.monotonic()
                usage = event.get("usage") or usage
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Served(arrival.at, first - sent, time.monotonic() - sent, usage["prompt_tokens"], cached)


def run(real: str, twin: tuple[str, Process], config: SimConfig, name: tuple[str, float], arrivals: list[Arrival]) -> Run:
    cpu = cpu_seconds(twin[1].pid)
    ours, theirs = asyncio.run(replay((real, twin[0]), arrivals))
    spent = cpu_seconds(twin[1].pid) - cpu
    faster, slower = (
        statistics.fmean(first_tokens(replace(config, speed=speed), arrivals)) for speed in (1 + SLIGHTLY, 1 - SLIGHTLY)
    )
    return Run(*name, arrivals[-1].at, ours, theirs, spent, faster, slower)


def traces(seed: int) -> Iterator[tuple[str, list[Arrival]]]:
    if (TRACES / MOONCAKE).exists():
        recorded = mooncake(TRACES / MOONCAKE, seed)
        yield "Mooncake, a 16th of the conversations, 32 times smaller", recorded
        yield "the same, from the 31st minute on", [arrival for arrival in recorded if arrival.at >= HALF_S]
    yield "gen:chat, smaller", chat(seed)


def report(fitted: str, errors: dict[str, float], runs: Sequence[Run], made_by: str) -> Iterator[str]:
    yield "# A twin beside its original\n"
    yield f"Made by `{made_by}`: {versions((f'torch {torch.__version__}', f'transformers {transformers.__version__}'))}.\n"
    yield (
        "SmolLM2-135M on one core and its simulated twin get the same requests at the same moments. TTFT in milliseconds: real,"
        " twin, and by how much the twin's is more. Load: of the time, in which the fitted engine would have something to do;"
        " busy: in which the real one had. The last column is what the twin's mean would be if it were a little faster or"
        " slower, in virtual time: where these are far apart, the trace is at the edge of what the engine carries, and chance"
        " decides.\n"
    )
    yield f"```\n{fitted}\n```\n"
    yield "Mean error of the fit: " + ", ".join(f"{kind} {error:.1%}" for kind, error in errors.items()) + ".\n"
    yield "| trace | load | busy | requests | hits | TTFT mean | p50 | p90 | end to end, mean | twin 3% faster, slower: mean |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for one in runs:
        yield _line(one)
    share = sum(one.twin_cpu for one in runs) / sum(one.seconds for one in runs)
    yield f"\nThe twin took {share:.1%} of a core."


def _line(one: Run) -> str:
    real, twin = ([served.ttft for served in side] for side in (one.real, one.twin))
    cells = [one.trace, f"{one.load:.0%}", f"{_busy(one.real, one.seconds):.0%}", str(len(real))]
    cells.append(f"{_hits(one.real):.1%}, {_hits(one.twin):.1%}")
    cells += [_both(statistics.fmean(real), statistics.fmean(twin)), *(_both(_at(real, q), _at(twin, q)) for q in (0.5, 0.9))]
    cells.append(_both(statistics.fmean(s.e2e for s in one.real), statistics.fmean(s.e2e for s in one.twin)))
    cells.append(f"{one.faster * 1000:.0f}, {one.slower * 1000:.0f}")
    return "| " + " | ".join(cells) + " |"


def _both(real: float, twin: float) -> str:
    return f"{real * 1000:.0f}, {twin * 1000:.0f} ({twin / real - 1:+.0%})"


def _at(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _hits(served: Sequence[Served]) -> float:
    return sum(one.cached for one in served) / sum(one.prompt for one in served)


def _busy(served: Sequence[Served], seconds: float) -> float:
    """The share of the time up to the last arrival in which a request was there."""
    busy, until = 0.0, 0.0
    for one in served:
        end = min(seconds, one.at + one.e2e)
        busy += max(0.0, end - max(until, one.at))
        until = max(until, end)
    return busy / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=150.0, help="how long requests come, for each load")
    options.add_argument("--loads", default="0.3,0.6,0.85")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=REPORTS)
    args = options.parse_args(arguments)
    core, others = cores()
    with ExitStack() as stack:
        stack.enter_context(pinned(others))
        url, _ = stack.enter_context(replica(REAL, "the real replica", core))
        measured = asyncio.run(Measurer(url, None, print).measure())
        fit = solve(measured)
        flags = flags_of(measured, fit)
        simulated = ["--engine", "sim", "--port", "0", *(word for flag in flags.items() for word in flag)]
        twin = stack.enter_context(replica(["replica", *simulated], "the twin", others))
        runs = []
        for name, arrivals in traces(args.seed):
            for load in map(float, args.loads.split(",")):
                runs.append(run(url, twin, fit.config, (name, load), at_load(fit.config, arrivals, load, args.seconds)))
                print(_line(runs[-1]), flush=True)
    lines = report(command_of(flags), errors_of(fit), runs, command("bench.twin", arguments))
    (args.out / "twin.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    raw = {"flags": flags, "runs": [asdict(one) for one in runs]}
    (args.out / "twin.json").write_text(json.dumps(raw) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
