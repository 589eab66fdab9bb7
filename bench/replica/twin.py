"""TTFT of a simulated twin and of its original on the same traces.

    python -m bench.replica.twin [--seconds 60] [--loads 0.3,0.6,0.85] [--out bench/reports]

The real replica (SmolLM2, one thread) has a core of its own, the load has the other. On a machine that is shared with others a
core is a third faster at one moment than at the next, so what was measured once is soon of another machine: rounds of
`warmroute replica fit` and traces take turns, and each trace comes twice, which shows how repeatable the original is. Then
twins, one for each trace, are started with the flags that follow from all rounds, and get the same requests. Which traces:
`twin_traces.py`. The load is what share of the time the fitted engine is busy; the table also has that of the real one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import aiohttp
import torch
import transformers

from bench.measure.cpu import cores, cpu_seconds, pinned
from bench.measure.machine import REPORTS, command, trace_folder, versions
from bench.replica.twin_traces import Arrival, at_load, busy_share, chat, first_tokens, mooncake
from gateway.commands.demo.processes import Process, ready_url
from replica.fit.command import command_of, errors_of, flags_of
from replica.fit.measure import Measurements, Measurer
from replica.fit.solve import Fit, solve
from replica.sim.cost import SimConfig

MOONCAKE = "mooncake_conversation.jsonl.gz"
HALF_S = 1800.0
SLIGHTLY = 0.03


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when it was due, seconds to its first token and to its last; tokens of its prompt, cached ones."""

    at: float
    ttft: float
    e2e: float
    prompt: int
    cached: int


@dataclass(slots=True)
class Run:
    """One trace at one load, as often as each side had it."""

    trace: str
    seconds: float
    arrivals: list[Arrival]
    real: list[list[Served]] = field(default_factory=list)
    twin: list[Served] = field(default_factory=list)

    @property
    def all_real(self) -> list[Served]:
        return [served for once in self.real for served in once]


@contextmanager
def replicas(arguments: Sequence[str], name: str, on: set[int], count: int = 1) -> Iterator[tuple[list[str], Process]]:
    """The URLs of `count` replicas, and the process in which they are."""
    urls = list[str]()

    def ready(line: str) -> bool:
        urls.extend(filter(None, [ready_url(line)]))
        return len(urls) == count

    with pinned(on):
        process = Process(name, ["replica", *arguments, "--port", "0", "--count", str(count)])
    try:
        process.wait_for(ready)
        yield urls, process
    finally:
        process.stop()


async def replay(url: str, arrivals: Sequence[Arrival]) -> list[Served]:
    """Send all, when they are due; the cache is empty at first."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as http:
        async with http.post(url + "/reset_prefix_cache") as response:
            assert (await response.json())["success"], "requests are still running"
        begun, tasks = time.monotonic(), list[asyncio.Task[Served]]()
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
            tasks.append(asyncio.create_task(_ask(http, url, arrival)))
        return await asyncio.gather(*tasks)


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


async def measure(url: str, options: argparse.Namespace) -> tuple[Measurements, list[Run]]:
    """Rounds of measurements and all traces, in turns; how fast these come follows from the first round."""
    async with Measurer(url, None, print) as measurer:
        await measurer.measure()
        config = solve(measurer.measured).config
        runs = [
            Run(name, options.seconds, at_load(config, arrivals, float(load), options.seconds))
            for name, arrivals in traces(options.seed)
            for load in options.loads.split(",")
        ]
        for turn, one in enumerate([*runs, *reversed(runs)]):
            one.real.append(await replay(url, one.arrivals))
            print(f"{one.trace}: {_mean(one.real[-1]):.3f} s to the first token", flush=True)
            if turn % 2:
                await measurer.measure()
        return measurer.measured, runs


async def replay_all(urls: Sequence[str], runs: Sequence[Run]) -> None:
    """Each trace to a twin of its own, at once: they sleep."""
    found = await asyncio.gather(*(replay(url, one.arrivals) for url, one in zip(urls, runs, strict=True)))
    for one, served in zip(runs, found, strict=True):
        one.twin = served


def traces(seed: int) -> Iterator[tuple[str, list[Arrival]]]:
    if (trace_folder() / MOONCAKE).exists():
        recorded = mooncake(trace_folder() / MOONCAKE, seed)
        yield "Mooncake, a 16th of the conversations, 32 times smaller", recorded
        yield "the same, from the 31st minute on", [arrival for arrival in recorded if arrival.at >= HALF_S]
    yield "gen:chat, smaller", chat(seed)


def report(fit: Fit, command_line: str, runs: Sequence[Run], cpu: float, made_by: str) -> Iterator[str]:
    yield "# A twin and its original\n"
    yield f"Made by `{made_by}`: {versions((f'torch {torch.__version__}', f'transformers {transformers.__version__}'))}.\n"
    yield (
        "SmolLM2-135M on one core gets each trace twice, its simulated twin once. TTFT in milliseconds: real, twin, and "
        "by how much the twin's is more. Load: of the time, in which the fitted engine has something to do; busy: in "
        "which the real one had. *Each time*: the mean TTFT of the real one whenever it got the trace, which shows how "
        "true it is to itself on this machine. The last column is what the twin's mean would be if it were a little "
        "faster or slower, in virtual time: where these are far apart, the trace is at the edge of what the engine "
        "carries, and chance decides.\n"
    )
    yield f"```\n{command_line}\n```\n"
    yield "Mean error of the fit: " + ", ".join(f"{kind} {error:.1%}" for kind, error in errors_of(fit).items()) + ".\n"
    yield "| trace | load | busy | requests | hits | TTFT mean | p50 | p90 | end to end | each time | twin 3% faster, slower |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for one in runs:
        yield _line(one, fit.config)
    yield f"\nEach twin took {cpu / sum(one.seconds for one in runs):.1%} of a core."


def _line(one: Run, config: SimConfig) -> str:
    real, twin = ([served.ttft for served in side] for side in (one.all_real, one.twin))
    busy = statistics.fmean(_busy(served, one.seconds) for served in one.real)
    cells = [one.trace, f"{busy_share(config, one.arrivals):.0%}", f"{busy:.0%}", str(len(one.arrivals))]
    cells.append(f"{_hits(one.all_real):.1%}, {_hits(one.twin):.1%}")
    cells += [_both(statistics.fmean(real), statistics.fmean(twin)), *(_both(_at(real, q), _at(twin, q)) for q in (0.5, 0.9))]
    cells.append(_both(statistics.fmean(s.e2e for s in one.all_real), statistics.fmean(s.e2e for s in one.twin)))
    cells.append(", ".join(f"{_mean(served) * 1000:.0f}" for served in one.real))
    other = (first_tokens(replace(config, speed=speed), one.arrivals) for speed in (1 + SLIGHTLY, 1 - SLIGHTLY))
    cells.append(", ".join(f"{statistics.fmean(times) * 1000:.0f}" for times in other))
    return "| " + " | ".join(cells) + " |"


def _mean(served: Sequence[Served]) -> float:
    return statistics.fmean(one.ttft for one in served)


def _both(real: float, twin: float) -> str:
    return f"{real * 1000:.0f}, {twin * 1000:.0f} ({twin / real - 1:+.0%})"


def _at(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def _hits(served: Sequence[Served]) -> float:
    return sum(one.cached for one in served) / sum(one.prompt for one in served)


def _busy(served: Sequence[Served], seconds: float) -> float:
    """The share of the time in which a request was there."""
    busy, until = 0.0, 0.0
    for one in served:
        end = min(seconds, one.at + one.e2e)
        busy += max(0.0, end - max(until, one.at))
        until = max(until, end)
    return busy / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0, help="how long requests come, for each load")
    options.add_argument("--loads", default="0.3,0.6,0.85")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=REPORTS)
    args = options.parse_args(arguments)
    core, others = cores()
    with pinned(others), replicas(["--threads", "1"], "the real replica", core) as (urls, _):
        measured, runs = asyncio.run(measure(urls[0], args))
    fit = solve(measured)
    flags = flags_of(measured, fit)
    simulated = ["--engine", "sim", *(word for flag in flags.items() for word in flag)]
    with replicas(simulated, "the twins", others, len(runs)) as (urls, process):
        cpu = cpu_seconds(process.pid)
        asyncio.run(replay_all(urls, runs))
        cpu = cpu_seconds(process.pid) - cpu
    args.out.mkdir(parents=True, exist_ok=True)
    raw = {"flags": flags, "measured": asdict(measured), "runs": [_raw(one) for one in runs]}
    (args.out / "twin.json").write_text(json.dumps(raw) + "\n", encoding="utf-8")
    text = "\n".join(report(fit, command_of(flags), runs, cpu, command("bench.replica.twin", arguments)))
    (args.out / "twin.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _raw(run: Run) -> dict[str, object]:
    """Without the prompts, which follow from the seed."""
    return {
        "trace": run.trace,
        "real": [[asdict(one) for one in once] for once in run.real],
        "twin": list(map(asdict, run.twin)),
    }


if __name__ == "__main__":
    main()
