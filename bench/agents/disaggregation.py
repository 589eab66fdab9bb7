"""Prefill and decode on different replicas, beside replicas that do both: over HTTP, with faults, and in the simulator.

    python -m bench.agents.disaggregation [--only TEXT] [--conversations N] [--out bench/reports]

Each fleet has four simulated replicas and a gateway of two workers. Prefills slow the tokens of running answers down there, as
in engines that compute both in one batch. The simulator's part needs the recorded conversations (see `bench.router.policies`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from bench.agents.bursts import words
from bench.measure.machine import command as command_of
from bench.measure.machine import trace_folder, versions
from gateway.commands.demo.processes import Process, listening_url, ready_url

TRACE: Final = "mooncake_conversation.jsonl.gz"
SIMULATED: Final = ("--hours", "0.3", *(f"--what-if=prefillers={count}" for count in (2, 4, 6)))
FLAGS: Final = ("--engine", "sim", "--port", "0", "--prefill-rate", "4000", "--decode-rate", "20", "--prefill-chunk", "1024")
TURNS: Final = 3
OUTPUT: Final = 40  # tokens
WORDS: Final = (400, 1500)  # of a user's turn
BEGIN_S: Final = 6.0  # conversations begin within it
THINK_S: Final = 2.0  # at most
KILLED_S: Final = 8.0  # after the begin
PROBED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class FleetCase:
    """A fleet. wire: the form of transfers, "": its replicas do both. killed: a prefiller is killed meanwhile."""

    title: str
    wire: str = ""
    killed: bool = False


FLEETS: Final = (
    FleetCase("four replicas that do both"),
    FleetCase("two prefillers, two decoders (vLLM's form)", "vllm"),
    FleetCase("the same, a prefiller killed", "vllm", killed=True),
    FleetCase("two and two (SGLang's form)", "sglang"),
    FleetCase("the same, one killed", "sglang", killed=True),
)


@dataclass(slots=True)
class Times:
    """Of all answers, in seconds. failed: the reasons."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def pool_of(case: FleetCase, urls: Sequence[str]) -> dict[str, Any]:
    """The configuration of the pool."""
    if not case.wire:
        return {"replicas": list(urls)}
    prefill, decode = urls[:2], urls[2:]
    if case.wire == "vllm":
        return {"prefill": list(prefill), "decode": list(decode)}
    ported = [{"url": url, "engine": "sglang", "bootstrap_port": int(url.rpartition(":")[2])} for url in prefill]
    return {"prefill": ported, "decode": [{"url": url, "engine": "sglang"} for url in decode]}


@contextlib.contextmanager
def fleet(case: FleetCase) -> Iterator[tuple[str, Process]]:
    """(the gateway's URL, the first replica: a prefiller, if there are any)."""
    with contextlib.ExitStack() as stack:
        replicas = list[Process]()
        for number in range(4):
            mode = ("--disaggregation-mode", "prefill" if number < 2 else "decode", "--transfer-wire", case.wire)
            replicas.append(Process(f"replica {number}", ["replica", *FLAGS, *(mode if case.wire else ())]))
            stack.callback(replicas[-1].stop)
        urls = [replica.wait_for(ready_url) for replica in replicas]
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gateway.json"
        config.write_text(json.dumps({"pools": [pool_of(case, urls)], "workers": 2}), "utf-8")
        gateway = Process("gateway", ["serve", "--config", str(config), "--host", "127.0.0.1", "--port", "0"])
        stack.callback(gateway.stop)
        yield gateway.wait_for(listening_url), replicas[0]


async def turn(session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], times: Times) -> str:
    """The answer; "" if it failed."""
    body = {"model": "sim", "messages": messages, "max_tokens": OUTPUT, "stream": True}
    pieces, last, done, begun = list[str](), 0.0, False, time.monotonic()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                done = done or line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"])
                if text := "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ())):
                    now = time.monotonic()
                    (times.gaps if pieces else times.ttft).append(now - (last or begun))
                    last = now
                    pieces.append(text)
    except (aiohttp.ClientError, ValueError) as error:
        times.failed.append(repr(error))
        return ""
    if not (done and pieces):
        times.failed.append("it has no end")
        return ""
    return "".join(pieces)


async def converse(session: aiohttp.ClientSession, url: str, chance: random.Random, times: Times) -> None:
    messages = list[dict[str, str]]()
    await asyncio.sleep(chance.uniform(0, BEGIN_S))
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(chance, chance.randrange(*WORDS))})
        text = await turn(session, url, messages, times)
        if not text:
            return
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(chance.uniform(0, THINK_S))


async def crowd(case: FleetCase, url: str, first: Process, conversations: int) -> Times:
    times, connector = Times(), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300), read_bufsize=1 << 20) as session:
        chances = [random.Random(number) for number in range(conversations)]
        talks = [asyncio.create_task(converse(session, url, chance, times)) for chance in chances]
        if case.killed:
            await asyncio.sleep(KILLED_S)
            os.kill(first.pid, signal.SIGKILL)
        await asyncio.gather(*talks)
    return times


def row_of(case: FleetCase, conversations: int) -> str:
    """The line of the table."""
    with fleet(case) as (url, first):
        time.sleep(PROBED_S)
        times = asyncio.run(crowd(case, url, first, conversations))
    for reason in times.failed:
        print(f"failed: {reason}", file=sys.stderr)
    ttft, gaps = sorted(times.ttft), sorted(times.gaps)
    shown = f"{sum(ttft) / len(ttft):.2f}, {_at(ttft, 0.9):.2f} | {_at(gaps, 0.5):.3f}, {_at(gaps, 0.99):.3f}"
    return f"| {case.title} | {len(times.failed)} of {len(ttft) + len(times.failed)} | {shown} |"


def _at(values: Sequence[float], share: float) -> float:
    """A quantile. values: sorted."""
    return values[int(share * (len(values) - 1))]


def simulated() -> str:
    """What `warmroute simulate` prints; "" without the trace."""
    trace = trace_folder() / TRACE
    if not trace.exists():
        return ""
    command = [sys.executable, "-m", "gateway", "simulate", str(trace), *SIMULATED]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agents.disaggregation", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="fleets whose title has it, and no simulator")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--out", type=Path, help="folder of the report")
    chosen = parser.parse_args(arguments)
    lines = [
        "# Prefill and decode on different replicas\n",
        f"Made by {command_of('bench.agents.disaggregation', arguments)}: {versions()}.\n",
        f"**Over HTTP**: four `warmroute {' '.join(('replica', *FLAGS))}`, a gateway of two workers, {chosen.conversations}"
        f" conversations of {TURNS} turns ({WORDS[0]} to {WORDS[1]} new words, {OUTPUT} tokens of output), streamed. A killed"
        f" prefiller dies {KILLED_S:g} s after the begin. Gap: time between tokens.\n",
        "| fleet | failed | TTFT mean, p90 (s) | gap p50, p99 (s) |",
        "|---|---|---|---|",
    ]
    for case in FLEETS:
        if chosen.only in case.title:
            lines.append(row_of(case, chosen.conversations))
            print(lines[-1], flush=True)
    if not chosen.only and (table := simulated()):
        print(table, flush=True)
        lines.append(
            f"\n**In the simulator** (`warmroute simulate {TRACE} {' '.join(SIMULATED)}`), where a prefill slows no answer, so"
            f" that only the price of a split shows:\n\n```\n{table.rstrip()}\n```"
        )
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "disaggregation.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
