"""Requests of two priorities at an engine that runs a few at once, with the gateway's default settings.

    python -m bench.agents.priorities [--runs N] [--low N] [--high N] [--out bench/reports]

Each run has a new simulated replica and a new gateway, which knows nothing of the replica's places. The high requests come
half a second after the low ones, when these fill the engine and its queue.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import aiohttp

from bench.agents.bursts import words
from bench.measure.machine import command as command_of
from bench.measure.machine import versions
from gateway.commands.demo.processes import Process, listening_url, ready_url

BATCH: Final = 8
FLAGS: Final = ("--engine", "sim", "--port", "0", "--max-batch", str(BATCH))
WORDS: Final = 160
OUTPUT: Final = 20  # tokens
HIGH: Final = 5  # priority
WITHIN_S: Final = 0.3  # requests of one priority begin within it
AFTER_S: Final = 0.5


async def ask(
    session: aiohttp.ClientSession, url: str, priority: int, name: int, ttft: list[float], whole: list[float]
) -> None:
    """One streamed request."""
    chance = random.Random(name)
    await asyncio.sleep(chance.uniform(0, WITHIN_S) + (AFTER_S if priority else 0.0))
    message = {"role": "user", "content": words(chance, WORDS)}
    body = {"model": "sim", "messages": [message], "max_tokens": OUTPUT, "stream": True}
    begun, first = time.monotonic(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body, headers={"X-Priority": str(priority)}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.monotonic()
    ttft.append(first - begun)
    whole.append(time.monotonic() - begun)


async def crowd(url: str, low: int, high: int) -> str:
    """The line of the table."""
    low_ttft, high_ttft, low_whole, high_whole = list[float](), list[float](), list[float](), list[float]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        lows = [ask(session, url, 0, number, low_ttft, low_whole) for number in range(low)]
        highs = [ask(session, url, HIGH, low + number, high_ttft, high_whole) for number in range(high)]
        await asyncio.gather(*lows, *highs)
    share, of_whole = fmean(high_ttft) / fmean(low_ttft), fmean(high_whole) / fmean(low_whole)
    return f"| {fmean(low_ttft):.2f} | {fmean(high_ttft):.2f} | {share:.2f} | {of_whole:.2f} |"


def run(low: int, high: int) -> str:
    replica = Process("replica", ["replica", *FLAGS])
    try:
        url = replica.wait_for(ready_url)
        gateway = Process("gateway", ["serve", "--replica", url, "--host", "127.0.0.1", "--port", "0"])
        try:
            return asyncio.run(crowd(gateway.wait_for(listening_url), low, high))
        finally:
            gateway.stop()
    finally:
        replica.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.priorities", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--low", type=int, default=60, help="requests of priority 0")
    parser.add_argument("--high", type=int, default=5, help=f"requests of priority {HIGH}")
    parser.add_argument("--out", type=Path, help="folder of the report")
    chosen = parser.parse_args(arguments)
    lines = [
        "# Priorities\n",
        f"Made by {command_of('bench.agents.priorities', arguments)}: {versions()}. `warmroute {' '.join(('replica', *FLAGS))}`"
        f" behind `warmroute serve` without options; {chosen.low} requests of priority 0, {chosen.high} of priority {HIGH}"
        f" {AFTER_S:g} s later; a run for each line.\n",
        "| TTFT of low, mean (s) | of high (s) | high to low | whole answer, high to low |",
        "|--:|--:|--:|--:|",
    ]
    for _ in range(chosen.runs):
        lines.append(run(chosen.low, chosen.high))
        print(lines[-1], flush=True)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "priorities.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
