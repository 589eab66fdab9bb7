"""What the session's term of the cost is worth: the production router with and without the sessions' names, on traces whose
prompts break the block keys and on those that do not.

    python -m bench.router.sessions [--workers N] [--workload agents_1m,gen:chat] [--out bench/reports]

Writes bench/reports/sessions.md. Prompts as the router sees them:

- clean: as they are.
- dropped nonce: a new nonce at the head of every prompt, which the engine drops before it computes the prompt: no key matches,
  while the engine's cache does.
- kept nonce: the engine keeps it, so its cache is as blind as the keys. What the term expects is never there.
- one id: clean, but all requests name the same session.
- keyless: prompts have no block keys at all, as if they were too short.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import numpy as np

from bench.measure.machine import REPORTS, commit, trace_folder
from bench.router.policies import cases, loaded
from gateway.config.schema import RoutingConfig
from router import Prompt, Router
from router.booking import Booking
from router.learning.sessions import session_key
from router.simulation.fleet import FleetSpec, Result, RouterPlacement, Simulation, summary
from router.simulation.workloads import Arrival, Request, Source
from router.types import KEY_BYTES

REPLICAS = 8
WITH, WITHOUT = "with sessions", "without"
SEEDS = MappingProxyType(
    {
        "conversation": 1,
        "agents_1m": 3,
        "agents_250k": 3,
        "gen:shared_prompt": 1,
        "gen:chat": 3,
        "gen:agents": 4,
        "gen:no_reuse": 1,
    }
)
CLEAN, DROPPED, KEPT, ONE_ID, KEYLESS = "clean", "dropped nonce", "kept nonce", "one id", "keyless"
ROWS = tuple((prompts, sessions) for prompts in (CLEAN, DROPPED, KEPT, ONE_ID, KEYLESS) for sessions in (WITH, WITHOUT))

Change = Callable[[Prompt], Prompt]


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    prompts: str
    sessions: str
    workload: str
    seed: int


def changed(prompt: Prompt, keys: bytes, session: int) -> Prompt:
    return Prompt(keys, prompt.units, prompt.block_units, prompt.scale, prompt.session, prompt.client, session)


class Nonces:
    """Gives each prompt keys that no other has."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def __call__(self, prompt: Prompt) -> Prompt:
        keys = np.frombuffer(prompt.keys, dtype="<u8") ^ np.uint64(self._chance.getrandbits(8 * KEY_BYTES))
        return changed(prompt, keys.tobytes(), prompt.session_key)


def as_seen(job: Job) -> Change:
    """What the router sees of a prompt."""
    nonces, one = Nonces(job.seed), session_key("company")

    def seen(prompt: Prompt) -> Prompt:
        if job.prompts == DROPPED:
            prompt = nonces(prompt)
        keys = b"" if job.prompts == KEYLESS else prompt.keys
        session = one if job.prompts == ONE_ID else prompt.session_key
        return changed(prompt, keys, session if job.sessions == WITH else 0)

    return seen


class Seeing(RouterPlacement):
    """Shows the router other prompts than the engines get."""

    def __init__(self, router: Router, spec: FleetSpec, seen: Change) -> None:
        super().__init__(router, spec)
        self._seen = seen

    def place(self, request: Request, now: float) -> tuple[int, Booking]:
        return super().place(dataclasses.replace(request, prompt=self._seen(request.prompt)), now)


class Changed:
    """A source whose prompts are changed for the router and the engines."""

    def __init__(self, source: Source, change: Change) -> None:
        self._source = source
        self._change = change

    def begin(self) -> Iterator[Arrival]:
        return ((at, self._request(request)) for at, request in self._source.begin())

    def after(self, request: Request, now: float) -> Arrival | None:
        following = self._source.after(request, now)
        return following and (following[0], self._request(following[1]))

    def _request(self, request: Request) -> Request:
        return dataclasses.replace(request, prompt=self._change(request.prompt))


def run(job: Job) -> tuple[Job, Result]:
    workload, spec = loaded(job.workload, REPLICAS, job.seed), FleetSpec(REPLICAS, cases()[job.workload].kv_tokens)
    config = RoutingConfig()
    router = Router(policy="cost", ttl_s=config.ttl_s, memory_bytes=config.memory_mb << 20, chance=random.Random(job.seed))
    source = workload.source()
    if job.prompts == KEPT:
        source = Changed(source, Nonces(job.seed))
    simulation = Simulation(spec, source, Seeing(router, spec, as_seen(job)))
    return job, summary(job.sessions, spec, list(simulation.run()), simulation.busy_s)


def report(found: Mapping[tuple[str, str, str], list[Result]], workloads: list[str]) -> Iterator[str]:
    yield "# What the session's term is worth\n"
    yield (
        f"Made by `python -m bench.router.sessions`: {commit()}, Python {platform.python_version()}. {REPLICAS} replicas, mean"
        " TTFT in seconds, token hit ratio in brackets; means over seeds ("
        + ", ".join(f"{name} {SEEDS[name]}" for name in workloads)
        + "). Differences under 3 % are noise. What the prompts are like: bench/router/sessions.py.\n"
    )
    yield f"| prompts | router | {' | '.join(workloads)} |"
    yield f"|---|---|{'--:|' * len(workloads)}"
    for prompts, sessions in ROWS:
        cells = (found[prompts, sessions, name] for name in workloads)
        means = ((fmean(one.ttft_mean_s for one in cell), fmean(one.hit_ratio for one in cell)) for cell in cells)
        yield f"| {prompts} | {sessions} | {' | '.join(f'{ttft:.3f} ({hits:.1%})' for ttft, hits in means)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router.sessions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--workload", default=",".join(SEEDS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=REPORTS, metavar="DIR", help="default: bench/reports")
    options = parser.parse_args(arguments)
    chosen = options.workload.split(",")
    if unknown := [name for name in chosen if name not in SEEDS]:
        parser.error(f"--workload: {unknown[0]!r} is not one of {', '.join(SEEDS)}")
    workloads = [name for name in chosen if not (file := cases()[name].file) or (trace_folder() / file).exists()]
    jobs = [Job(*row, name, seed) for name in workloads for seed in range(SEEDS[name]) for row in ROWS]
    found: dict[tuple[str, str, str], list[Result]] = {}
    with multiprocessing.Pool(options.workers) as pool:
        for job, result in pool.imap(run, jobs):
            found.setdefault((job.prompts, job.sessions, job.workload), []).append(result)
    text = "\n".join(report(found, workloads)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "sessions.md").write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
