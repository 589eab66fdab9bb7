"""Does a replay of recorded traffic say what was measured? A real gateway, real replicas, the real commands.

    python -m bench.router.recorded [--seconds 180] [--seed 1] [--report]

Conversations over shared system prompts go through a gateway in front of four simulated replicas, each a process, while
`warmroute record` records them. Then `warmroute simulate` replays the recording, once with the rates that the recording shows
and once with those that the replicas were started with, and its hits and mean TTFT are set beside the measured ones. --report
writes bench/reports/recorded.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from bench.measure.machine import REPORTS, ROOT, command, versions
from gateway.commands.demo.processes import Process, admin_url, listening_url, ready_url

REPLICAS: Final = 4
PREFILL, DECODE = 1000.0, 50.0  # tokens per second
SYSTEM_WORDS, MESSAGE_WORDS = 700, 120
SYSTEMS: Final = 4
MODEL: Final = "sim"
WARM_S: Final = 30.0  # of load before the recording begins


@dataclass(frozen=True, slots=True)
class Scene:
    """One run. kv_tokens: of a replica. users: each has one conversation after the other. think_s: on average. flags: of the
    replicas."""

    name: str
    kv_tokens: int
    users: int
    think_s: float
    sample: float = 1.0
    flags: tuple[str, ...] = ()


SCENES: Final = (
    Scene("memory for all", 200_000, 32, 3.0),
    Scene("too little memory", 12_000, 28, 3.0),
    Scene("busy", 60_000, 44, 2.0),
    Scene("nearly saturated", 60_000, 56, 2.0),
    Scene("a sample of 30 %", 200_000, 40, 4.0, sample=0.3),
    Scene("chunked prefill", 60_000, 28, 3.0, flags=("--prefill-chunk", "512", "--decode-slowdown", "0.02", "--step-ms", "2")),
)


@dataclass(slots=True)
class Seen:
    """What the clients saw: of each answer seconds to its first text, prompt and cached tokens."""

    ttft: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0

    @property
    def summary(self) -> dict[str, Any]:
        waits = sorted(self.ttft)
        mean, p90 = sum(waits) / len(waits), waits[int(0.9 * len(waits))]
        return {"hits": self.cached / self.prompt, "ttft": mean, "p90": p90, "requests": len(waits)}

    def forget(self) -> None:
        """What was before the recording."""
        self.ttft.clear()
        self.prompt = self.cached = 0


def words(chance: random.Random, count: int) -> str:
    return " ".join(
        f"{chance.choice('bcdfghklmnprstvw')}{chance.choice('aeiou')}{chance.randrange(1000)}" for _ in range(count)
    )


def size(chance: random.Random, mean: int) -> int:
    return max(5, int(chance.lognormvariate(0, 0.6) * mean / 1.2))


async def user(http: aiohttp.ClientSession, chance: random.Random, number: int, scene: Scene, until: float, seen: Seen) -> None:
    await asyncio.sleep(chance.random() * scene.think_s * 2)
    conversation = 0
    while time.monotonic() < until:
        conversation += 1
        kind = int(chance.random() ** 2 * SYSTEMS)
        messages = [{"role": "system", "content": words(random.Random(kind), SYSTEM_WORDS + 150 * kind)}]
        for _ in range(chance.randrange(2, 9)):
            messages.append({"role": "user", "content": words(chance, size(chance, MESSAGE_WORDS))})
            name = f"{number}-{conversation}" if number % 2 else ""  # half of the clients name no session
            answer = await ask(http, f"user-{number}", messages, chance.randrange(20, 100), name, seen)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(chance.expovariate(1 / scene.think_s))
            if time.monotonic() > until:
                return


async def ask(http: aiohttp.ClientSession, user: str, messages: list[Any], tokens: int, session: str, seen: Seen) -> str:
    """user: its key, by which the gateway knows it again."""
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {user}"} | ({"X-Session-Id": session} if session else {})
    sent, first, text = time.monotonic(), 0.0, ""
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            first = first or time.monotonic()
            if usage := event.get("usage"):
                seen.prompt += usage["prompt_tokens"]
                seen.cached += usage["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    seen.ttft.append(first - sent)
    return text


async def load(url: str, scene: Scene, seconds: float, seed: int, seen: Seen) -> None:
    until = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        chances = [random.Random(f"{seed} {scene.name} {number}") for number in range(scene.users)]
        await asyncio.gather(*(user(http, chance, number, scene, until, seen) for number, chance in enumerate(chances)))


def simulated(trace: Path, *flags: str) -> dict[str, Any]:
    arguments = [sys.executable, "-m", "gateway", "simulate", str(trace), "--json", *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def recorded(scene: Scene, seconds: float, seed: int, folder: Path) -> Seen:
    seen = Seen()
    with ExitStack() as stack:

        def started(name: str, *arguments: str) -> Process:
            process = Process(name, list(arguments))
            stack.callback(process.stop)
            return process

        rates = ("--prefill-rate", str(PREFILL), "--decode-rate", str(DECODE), "--kv-tokens", str(scene.kv_tokens))
        replica = ("replica", "--engine", "sim", "--port", "0", "--served-model-name", MODEL, *rates, *scene.flags)
        replicas = [started(f"replica {number}", *replica).wait_for(ready_url) for number in range(REPLICAS)]
        listeners = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
        config = {**listeners, "pools": [{"replicas": replicas}], "state": {"url": "off"}, "snapshot": {"file": "off"}}
        file, trace = folder / f"{scene.name}.yaml", folder / f"{scene.name}.jsonl.gz"
        file.write_text(yaml.safe_dump(config))
        gateway = started("gateway", "serve", "--config", str(file))
        url, admin = gateway.wait_for(listening_url), gateway.wait_for(admin_url)
        background = threading.Thread(target=lambda: asyncio.run(load(url, scene, WARM_S + seconds, seed, seen)))
        background.start()
        time.sleep(WARM_S)
        seen.forget()
        recorder = started(
            "recorder", "record", "--admin", admin, "--output", str(trace), "--sample", str(scene.sample), "--replace"
        )
        recorder.wait_for(lambda line: "recording to" in line)
        background.join()
        recorder.stop()
        return seen


def rows(scene: Scene, trace: Path, seen: dict[str, Any]) -> Iterator[str]:
    """Lines of the report's table. Replays are set beside what the gateway has recorded of the same requests."""
    shown = simulated(trace)
    was, rates = shown["measured"], shown["fleet"]

    def row(name: str, hits: float, ttft: float, p90: float, requests: int) -> str:
        off = f"{(hits - was['hit_ratio']) * 100:+.1f} points | {ttft / was['ttft_mean_s'] - 1:+.1%}"
        return f"| {scene.name} | {name} | {requests} | {hits:.1%} | {ttft:.3f} | {p90:.3f} | {off} |"

    yield row("seen by the clients, warm-up included", seen["hits"], seen["ttft"], seen["p90"], seen["requests"])
    started_with = ("--prefill-rate", str(PREFILL), "--decode-rate", str(DECODE))
    given = simulated(trace, *started_with)["results"][0]
    at_times = simulated(trace, "--open")["results"][0]
    found = f"replayed, rates of the recording ({rates['prefill_rate']:.0f} and {rates['decode_rate']:.1f} tokens/s)"
    for title, one in (
        ("measured", was),
        (found, shown["results"][0]),
        *((f"replay {number}", each) for number, each in enumerate(shown["results"][0]["replays"], 1)),
        ("replayed, rates of the replicas", given),
        ("replayed at the recorded times (--open)", at_times),
    ):
        yield row(title, one["hit_ratio"], one["ttft_mean_s"], one["ttft_p90_s"], one["requests"])


HEAD: Final = """| scene | | requests | hits | mean TTFT, s | p90, s | hits off by | mean TTFT off by |
|---|---|--:|--:|--:|--:|--:|--:|"""


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1, help="of the conversations (default: 1)")
    parser.add_argument("--only", type=int, help="number of one scene, from 0")
    parser.add_argument("--keep", type=Path, help="folder for the recordings (default: a temporary one)")
    parser.add_argument("--again", action="store_true", help="replay the recordings of --keep again")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(arguments)
    lines = [HEAD]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for scene in SCENES if options.only is None else [SCENES[options.only]]:
            trace, seen = folder / f"{scene.name}.jsonl.gz", folder / f"{scene.name}.json"
            if not options.again:
                seen.write_text(json.dumps(recorded(scene, options.seconds, options.seed, folder).summary), "utf-8")
            lines += rows(scene, trace, json.loads(seen.read_text("utf-8")))
            print("\n".join(lines[-10:]), flush=True)
    if options.report:
        (REPORTS / "recorded.md").write_text(report(lines, options.seconds), "utf-8")


def report(lines: Sequence[str], seconds: float) -> str:
    about = (
        f"{REPLICAS} simulated replicas, each a process ({PREFILL:.0f} tokens/s of prefill, {DECODE:.0f} of decode);"
        f" conversations of 2 to 8 turns over {SYSTEMS} system prompts, half with a session's name; each user has a key and one"
        f" conversation after the other; {seconds:.0f} s each."
    )
    reading = (
        "Offsets are from what was measured of the same requests. A row `replayed` is the median of the five replays below it:"
        " how far these are apart is how much chance there is in one run, the measured one included. Near saturation, and where"
        " memory is short, that is much; one run of a hundred seconds says little about waits there."
    )
    head = ["# Recorded traffic, replayed", "", f"`{command('bench.router.recorded', ['--report'])}`. {versions()}", "", about]
    return "\n".join([*head, "", reading, "", *lines, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
