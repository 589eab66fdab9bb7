"""python -m bench.fleet.savings: what `routing.compare` says other policies would have found cached, against the truth.

The same conversations go to a cold fleet of simulated replicas under the default policy, with the comparison on, and then
really round robin, to the least loaded one, and by their session. Heads are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.fleet.loads import Session
from bench.fleet.stage import send, staged

REPORT = Path("bench/reports/savings.md")
FLEET, CONCURRENT, THINK_S = 4, 24, 0.02
HEADS, HEAD_WORDS, TURN_WORDS, TURNS = 4, 700, 90, 8
PREFILL_RATE = 20_000
# A prompt has 2,500 tokens on average: room for those that run at once and little more, and for all.
SIZES = {"small caches": 24_000, "large caches": 200_000}


def conversations(count: int, seed: int) -> list[Session]:
    """Each begins with one of the heads; a turn adds words to all before."""
    chance = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(f"w{chance.randrange(10_000)}" for _ in range(number))

    heads = [words(HEAD_WORDS) for _ in range(HEADS)]
    found = list[Session]()
    for number in range(count):
        prompt, bodies = chance.choice(heads), list[bytes]()
        for _ in range(chance.randint(1, 2 * TURNS)):
            prompt += " " + words(chance.randint(TURN_WORDS // 3, TURN_WORDS * 2))
            bodies.append(
                json.dumps({"model": "sim", "prompt": prompt, "max_tokens": 8, "prompt_cache_key": f"s{number}"}).encode()
            )
        found.append(bodies)
    return found


async def run(policy: str, sessions: list[Session], kv_tokens: int, workers: int) -> tuple[float, dict[str, float]]:
    """The share of prompt tokens that were cached, and of each policy by its shadows."""
    simulated = ("--engine", "sim", "--kv-tokens", str(kv_tokens), "--prefill-rate", str(PREFILL_RATE), "--decode-rate", "200")
    with tempfile.TemporaryDirectory() as folder:
        routing = {"policy": policy, "compare": policy == "cost"}
        changes = {"routing": routing, "workers": workers}
        async with staged(1, Path(folder), shared=False, fleet=FLEET, simulated=simulated, **changes) as (made, _):
            sent = await send(made.urls, sessions, concurrent=CONCURRENT, think_s=THINK_S, seed=1)
            assert not sent.failed, sent.failed
            shadows = await _shadows(made.urls[0]) if policy == "cost" else {}
    return sent.share(), shadows


async def _shadows(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        text = await answer.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    total = next(each.value for each in samples if each.name == "warmroute_compared_prompt_tokens_total")
    cached = [each for each in samples if each.name == "warmroute_policy_cached_tokens_total"]
    return {each.labels["policy"]: each.value / total for each in cached}


HEAD = """# What other policies would have found

`python -m bench.fleet.savings`: {count} conversations, {fleet} simulated replicas, workers: {workers}; shares of prompt tokens.

A shadow knows no queues: where running requests fill most of a cache (small caches: 24,000 tokens, 6 requests of 2,500), and a
policy lets them pile up, as round robin does, it finds too much.

- delivered: shadow of the replicas that were chosen, and what their engines reported;
- the others: shadow, corrected by the error of delivered, while the default policy serves (`routing.compare`), and the same
  conversations really sent so. (`sticky`, which stands for the session hash, leaves a replica that is too loaded.)

| caches | policy | shadow | truth | points |
|---|---|--:|--:|--:|
"""


async def main(count: int, workers: int) -> str:
    lines = [HEAD.format(count=count, fleet=FLEET, workers=workers)]
    for name, kv_tokens in SIZES.items():
        sessions = conversations(count, 7)
        served, shadows = await run("cost", sessions, kv_tokens, workers)
        error = shadows["actual"] - served
        lines.append(_row(name, "delivered", shadows["actual"], served))
        for policy, real in (("round_robin", "round_robin"), ("least_loaded", "least_loaded"), ("session", "sticky")):
            truth, _ = await run(real, sessions, kv_tokens, workers)
            lines.append(_row(name, policy, shadows[policy] - error, truth))
    return "".join(lines)


def _row(caches: str, policy: str, shadow: float, truth: float) -> str:
    row = f"| {caches} | {policy} | {shadow:.1%} | {truth:.1%} | {100 * (shadow - truth):+.1f} |\n"
    print(row, end="", flush=True)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=150, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, help="(default: %(default)s)")
    options = parser.parse_args()
    options.report.write_text(asyncio.run(main(options.conversations, options.workers)), "utf-8")
