"""Conversations over replicas with data-parallel ranks: a private cache for each rank behind one URL.

    python -m bench.agents.ranks [--before FOLDER] [--url URL --model NAME] [--conversations N] [--out bench/reports]

All systems are in front of the same replicas, two of four ranks, and take turns; each has conversations of its own. --before:
the sources of an earlier version. --url: a running server, such as vLLM with --data-parallel-size 2, in place of the simulated
ones. A turn *stays* if nine tenths of the conversation's earlier prompt were cached.
"""

from __future__ import annotations

import argparse
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
from bench.agents.bursts import words
from bench.gateway.systems import BEFORE, SYSTEMS, Running, Setting, System, another_build, good, started
from bench.measure.machine import command as command_of
from bench.measure.machine import versions
from gateway.commands.demo.processes import Process, ready_url

MODEL, RANKS, REPLICAS, TURNS, OUTPUT = "sim", 4, 2, 6, 20
FLAGS = ("--engine", "sim", "--prefill-rate", "4000", "--kv-tokens", "60000", "--ranks", str(RANKS))
THINK_S = 0.3


@dataclass(slots=True)
class Counted:
    """Of all turns of a system but the first ones. ttft: seconds, of each."""

    turns: int = 0
    stayed: int = 0
    prompt: int = 0
    cached: int = 0
    failed: int = 0
    ttft: list[float] = field(default_factory=list)


def systems(before: Path | None) -> list[System]:
    """Ours, ours with requests that name no rank, the version before, SMG."""
    ours = warmroute()

    def unranked(at: Setting) -> list[str]:
        config = at.folder / "warmroute.yaml"
        config.write_text(json.dumps({"pools": [{"replicas": [{"url": url, "ranks": 1} for url in at.urls]}]}), "utf-8")
        address = ["--host", "127.0.0.1", "--port", str(at.port)]
        return [at.program, "-m", "gateway", "serve", *address, "--config", str(config)]

    earlier = [another_build(before)] if before else []
    smg = [system for system in SYSTEMS if system.name == "smg"]
    return [system for system in (ours, replace(ours, name="ranks: 1", command=unranked), *earlier, *smg) if system.path]


async def turn(
    session: aiohttp.ClientSession, port: int, model: str, messages: list[dict[str, str]]
) -> tuple[float, str, dict[str, Any]]:
    """(seconds to the first token, the answer, its usage)."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": OUTPUT,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, usage, pieces = time.monotonic(), 0.0, dict[str, Any](), list[str]()
    async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if text and not first:
                    first = time.monotonic()
                pieces.append(text)
                usage = event.get("usage") or usage
    return first - begun, "".join(pieces), usage


async def converse(
    session: aiohttp.ClientSession, port: int, model: str, size: int, chance: random.Random, counted: Counted
) -> None:
    messages, before = list[dict[str, str]](), 0
    for number in range(TURNS):
        messages.append({"role": "user", "content": words(chance, size)})
        ttft_s, text, usage = await turn(session, port, model, messages)
        if ttft_s < 0 or not usage:
            counted.failed += 1
            return
        if number:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counted.turns += 1
            counted.stayed += cached >= 0.9 * before
            counted.prompt += usage["prompt_tokens"]
            counted.cached += cached
            counted.ttft.append(ttft_s)
        before = usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(chance.uniform(0, 2 * THINK_S))


async def crowd(port: int, model: str, conversations: int, size: int, seed: str) -> Counted:
    counted = Counted()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session:
        chances = [random.Random(f"{seed} {number}") for number in range(conversations)]
        await asyncio.gather(*[converse(session, port, model, size, chance, counted) for chance in chances])
    return counted


@contextlib.contextmanager
def simulated() -> Iterator[list[str]]:
    """The URLs of REPLICAS replicas."""
    urls = list[str]()

    def ready(line: str) -> bool:
        urls.extend(filter(None, [ready_url(line)]))
        return len(urls) == REPLICAS

    process = Process("replicas", ["replica", *FLAGS, "--port", "0", "--count", str(REPLICAS)])
    try:
        process.wait_for(ready)
        yield urls
    finally:
        process.stop()


def rows(urls: Sequence[str], model: str, conversations: int, size: int, before: Path | None, seed: int) -> Iterator[str]:
    """The lines of the table."""
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        for place, system in enumerate(systems(before)):
            with contextlib.ExitStack() as stack:
                running: Running = stack.enter_context(started(system, list(urls), Path(folder) / str(place), cores, _lists))
                time.sleep(3)  # the first probes of the metrics
                counted = asyncio.run(crowd(running.port, model, conversations, size, f"{seed} {place}"))
            title = before.name if before and system.name == BEFORE else system.name
            ttft = sorted(counted.ttft) or [0.0]
            times = f"{sum(ttft) / len(ttft):.2f} | {ttft[int(0.95 * (len(ttft) - 1))]:.2f}"
            share = f"{counted.stayed / max(1, counted.turns):.0%} | {counted.cached / max(1, counted.prompt):.0%}"
            failed = f" ({counted.failed} failed)" if counted.failed else ""
            yield f"| {title}{failed} | {counted.turns} | {share} | {counted.prompt - counted.cached:,} | {times} |"


def _lists(port: int) -> bool:
    return good(port, "GET", "/v1/models", None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.ranks", description=__doc__)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="the sources of an earlier version")
    parser.add_argument("--url", help="a running server with ranks, in place of simulated ones")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--words", type=int, default=250, help="of a user's turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder of the report")
    chosen = parser.parse_args(arguments)
    engine = f"{REPLICAS} `warmroute replica {' '.join(FLAGS)}`" if not chosen.url else f"the server {chosen.url}"
    lines = [
        "# Data-parallel ranks\n",
        f"Made by {command_of('bench.agents.ranks', arguments)}: {versions()}. {engine}; {chosen.conversations}"
        f" conversations of {TURNS} turns, {chosen.words} words each. Turns after the first; *ranks: 1* names no rank.\n",
        "| system | turns | stay | cached | computed tokens | TTFT mean s | p95 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    with contextlib.ExitStack() as stack:
        urls = [chosen.url] if chosen.url else stack.enter_context(simulated())
        for row in rows(urls, chosen.model, chosen.conversations, chosen.words, chosen.before, chosen.seed):
            print(row, flush=True)
            lines.append(row)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "ranks.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
