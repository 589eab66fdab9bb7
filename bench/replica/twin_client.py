"""Sends due requests to the twin or its original, measures their answers, and prints both side by side."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from bench.replica.twin_traces import Arrival


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when it was due, seconds to its first token and to its last; tokens of its prompt, cached ones."""

    at: float
    ttft: float
    e2e: float
    prompt: int
    cached: int


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """For requests to a replica whose cache is empty at first."""
    connections, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=connections, timeout=timeout) as http:
        async with http.post("/reset_prefix_cache") as response:
            assert (await response.json())["success"], "requests are still running"
        yield http


async def replay(http: aiohttp.ClientSession, arrivals: Sequence[Arrival]) -> list[Served]:
    """Send all, when they are due."""
    begun, tasks = time.monotonic(), list[asyncio.Task[Served]]()
    for arrival in arrivals:
        if (early_s := begun + arrival.at - time.monotonic()) > 0:
            await asyncio.sleep(early_s)
        tasks.append(asyncio.create_task(_ask(http, arrival)))
    return await asyncio.gather(*tasks)


async def _ask(http: aiohttp.ClientSession, arrival: Arrival) -> Served:
    body = {"prompt": arrival.prompt, "max_tokens": arrival.output, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    sent, first, usage = time.monotonic(), 0.0, None
    async with http.post("/v1/completions", json=body | stream) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first = first or time.monotonic()
                usage = event.get("usage") or usage
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Served(arrival.at, first - sent, time.monotonic() - sent, usage["prompt_tokens"], cached)


def both(real: Sequence[float], twin: Sequence[float]) -> str:
    """The means, in milliseconds of what was in seconds, and by how much the twin's is more."""
    return compared(statistics.fmean(real), statistics.fmean(twin))


def compared(real_s: float, twin_s: float) -> str:
    return f"{real_s * 1000:.0f}, {twin_s * 1000:.0f} ({twin_s / real_s - 1:+.0%})"


def hits(served: Sequence[Served]) -> float:
    """The share of the prompts' tokens that was cached."""
    return sum(one.cached for one in served) / sum(one.prompt for one in served)


def mean_ttft(served: Sequence[Served]) -> float:
    return statistics.fmean(one.ttft for one in served)
