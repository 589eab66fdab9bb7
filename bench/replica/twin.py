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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers

from bench.measure.cpu import cores, cpu_seconds, pinned
from bench.measure.machine import REPORTS, command, trace_folder, versions
from bench.replica.twin_client import Served, both, compared, emptied, hits, mean_ttft, replay
from bench.replica.twin_document import AT_ONCE, ask_about_document, document_report
from bench.replica.twin_traces import Arrival, at_load, busy_share, chat, first_tokens, mooncake
from gateway.commands.demo.processes import Process, ready_url
from replica.fit.command import command_of, errors_of, flags_of
from replica.fit.measure import Measurements, Measurer
from replica.fit.solve import Fit, solve
from replica.sim.cost import SimConfig

MOONCAKE = "mooncake_conversation.jsonl.gz"
HALF_S = 1800.0
SLIGHTLY = 0.03


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


async def measure(url: str, options: argparse.Namespace) -> tuple[Measurements, list[Run], list[list[list[Served]]]]:
    """Rounds of measurements and all traces, in turns; how fast these come follows from the first round. And what was asked
    about the document, in the middle and at the end.
    """
    async with Measurer(url, None, print) as measurer:
        await measurer.measure()
        config = solve(measurer.measured).config
        runs = [
            Run(name, options.seconds, at_load(config, arrivals, float(load), options.seconds))
            for name, arrivals in traces(options.seed)
            for load in options.loads.split(",")
        ]
        about = list[list[list[Served]]]()
        for turn, one in enumerate([*runs, *reversed(runs)]):
            async with emptied(url) as http:
                one.real.append(await replay(http, one.arrivals))
            print(f"{one.trace}: {mean_ttft(one.real[-1]):.3f} s to the first token", flush=True)
            if turn % 2:
                await measurer.measure()
            if turn + 1 in (len(runs), 2 * len(runs)):
                about.append(await ask_about_document(url))
                print(f"a shared document: {mean_ttft(about[-1][-1]):.3f} s for {AT_ONCE[-1]} at once", flush=True)
        return measurer.measured, runs, about


async def replay_all(urls: Sequence[str], runs: Sequence[Run]) -> None:
    """Each trace to a twin of its own, at once: they sleep."""

    async def run(url: str, one: Run) -> None:
        async with emptied(url) as http:
            one.twin = await replay(http, one.arrivals)

    await asyncio.gather(*map(run, urls, runs))


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
    cells.append(f"{hits(one.all_real):.1%}, {hits(one.twin):.1%}")
    cells += [both(real, twin), *(compared(_at(real, q), _at(twin, q)) for q in (0.5, 0.9))]
    cells.append(both([s.e2e for s in one.all_real], [s.e2e for s in one.twin]))
    cells.append(", ".join(f"{mean_ttft(served) * 1000:.0f}" for served in one.real))
    other = (first_tokens(replace(config, speed=speed), one.arrivals) for speed in (1 + SLIGHTLY, 1 - SLIGHTLY))
    cells.append(", ".join(f"{statistics.fmean(times) * 1000:.0f}" for times in other))
    return "| " + " | ".join(cells) + " |"


def _at(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


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
        measured, runs, about = asyncio.run(measure(urls[0], args))
    fit = solve(measured)
    flags = flags_of(measured, fit)
    simulated = ["--engine", "sim", *(word for flag in flags.items() for word in flag)]
    with replicas(simulated, "the twins", others, len(runs) + 1) as (urls, process):
        cpu = cpu_seconds(process.pid)
        asyncio.run(replay_all(urls, runs))
        cpu = cpu_seconds(process.pid) - cpu
        about_twin = asyncio.run(ask_about_document(urls[-1]))
    args.out.mkdir(parents=True, exist_ok=True)
    raw = {"flags": flags, "measured": asdict(measured), "runs": [_raw(one) for one in runs]}
    raw["document"] = {"real": list(map(_raw_document, about)), "twin": _raw_document(about_twin)}
    (args.out / "twin.json").write_text(json.dumps(raw) + "\n", encoding="utf-8")
    lines = report(fit, command_of(flags), runs, cpu, command("bench.replica.twin", arguments))
    text = "\n".join([*lines, *document_report(about, about_twin)])
    (args.out / "twin.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _raw_document(about: Sequence[Sequence[Served]]) -> list[list[dict[str, object]]]:
    return [list(map(asdict, served)) for served in about]


def _raw(run: Run) -> dict[str, object]:
    """Without the prompts, which follow from the seed."""
    return {
        "trace": run.trace,
        "real": [[asdict(one) for one in once] for once in run.real],
        "twin": list(map(asdict, run.twin)),
    }


if __name__ == "__main__":
    main()
