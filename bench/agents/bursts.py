"""Sub-agents that begin at once with one cold head, through real gateways to simulated replicas.

    python -m bench.router.bursts --live [--before FOLDER]

All systems are in front of the same replicas and take turns, burst by burst; each burst has a head of its own. So they share
the machine and its moments, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.agents.__main__ import warmroute
from bench.gateway.systems import BEFORE, SYSTEMS, Running, Setting, System, another_build, good, started
from gateway.commands.demo.processes import Process, ready_url

MODEL = "sim"
RATE = 4000  # tokens/s of prefill
FLAGS = ("--engine", "sim", "--served-model-name", MODEL, "--prefill-rate", str(RATE), "--kv-tokens", "400000")
ENGINES = {"llamacpp": ("--slots",), "warmroute": ()}  # by their names in the configuration
REPLICAS, ROUNDS, SIZES, OUTPUT = 3, 4, (6, 20), 30
HEAD_WORDS, TASK_WORDS, SPREAD_S = 8000, 600, 0.01


@dataclass(slots=True)
class Counted:
    """Of all bursts of a system. ttft: seconds, of each request."""

    prompt: int = 0
    computed: int = 0
    ttft: list[float] = field(default_factory=list)
    failed: int = 0


def systems(before: Path | None, engine: str) -> list[System]:
    """Ours is told the engine, which it recognises if it is a real one."""
    ours = warmroute()

    def command(at: Setting) -> list[str]:
        replicas = [{"url": url, "engine": engine} for url in at.urls]
        config = at.folder / "warmroute.yaml"
        config.write_text(json.dumps({"pools": [{"replicas": replicas}]}), "utf-8")
        address = ["--host", "127.0.0.1", "--port", str(at.port)]
        return [at.program, "-m", "gateway", "serve", *address, "--config", str(config)]

    earlier = [another_build(before)] if before else []
    smg = [system for system in SYSTEMS if system.name == "smg"]
    return [system for system in (replace(ours, command=command), *earlier, *smg) if system.path]


def words(chance: random.Random, count: int) -> str:
    return " ".join([f"{chance.randrange(36**3):x}" for _ in range(count)])


async def ask(session: aiohttp.ClientSession, port: int, head: str, task: str, counted: Counted) -> None:
    """One sub-agent's first request."""
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": head}, {"role": "user", "content": task}],
        "max_tokens": OUTPUT,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, usage = time.monotonic(), 0.0, dict[str, Any]()
    async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if not first and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    first = time.monotonic()
                usage = event.get("usage") or usage
    if not (first and usage):
        counted.failed += 1
        return
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counted.prompt += usage["prompt_tokens"]
    counted.computed += usage["prompt_tokens"] - cached
    counted.ttft.append(first - begun)


async def burst(port: int, agents: int, chance: random.Random, counted: Counted) -> None:
    head = words(chance, HEAD_WORDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session:

        async def after(seconds: float, task: str) -> None:
            await asyncio.sleep(seconds)
            await ask(session, port, head, task, counted)

        await asyncio.gather(*[after(chance.uniform(0, SPREAD_S), words(chance, TASK_WORDS)) for _ in range(agents)])


def measured(running: Sequence[Running], agents: int, seed: int) -> dict[str, Counted]:
    """ROUNDS bursts through each, in turns."""
    found = {each.system.name: Counted() for each in running}
    for number in range(ROUNDS):
        for place, each in enumerate(running):
            chance = random.Random(f"{seed} {agents} {number} {place}")
            asyncio.run(burst(each.port, agents, chance, found[each.system.name]))
    return found


@contextlib.contextmanager
def simulated(flags: Sequence[str]) -> Iterator[list[str]]:
    """The URLs of REPLICAS replicas."""
    urls = list[str]()

    def ready(line: str) -> bool:
        urls.extend(filter(None, [ready_url(line)]))
        return len(urls) == REPLICAS

    process = Process("replicas", ["replica", *FLAGS, *flags, "--port", "0", "--count", str(REPLICAS)])
    try:
        process.wait_for(ready)
        yield urls
    finally:
        process.stop()


def rows(before: Path | None, seed: int) -> Iterator[str]:
    """The lines of the table. before: the sources of another version."""
    cores = os.sched_getaffinity(0)
    for engine, flags in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder, simulated(flags) as urls, contextlib.ExitStack() as stack:
            running = [
                stack.enter_context(started(system, urls, Path(folder) / str(place), cores, _lists_models))
                for place, system in enumerate(systems(before, engine))
            ]
            for agents in SIZES:
                for name, counted in measured(running, agents, seed).items():
                    ttft = counted.ttft or [0.0]
                    title = before.name if before and name == BEFORE else name
                    failed = f" ({counted.failed} failed)" if counted.failed else ""
                    times = f"{sum(ttft) / len(ttft):.2f} | {max(ttft):.2f}"
                    yield f"| {engine} | {agents} | {title}{failed} | {counted.computed:,} | {times} |"


def _lists_models(port: int) -> bool:
    return good(port, "GET", "/v1/models", None)
