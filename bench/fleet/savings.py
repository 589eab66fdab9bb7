"""python -m bench.fleet.savings: what `routing.compare` says other policies would have found cached, against the truth.

The same conversations go to a cold fleet of simulated replicas under the default policy, with the comparison on, and then
really round robin, to the least loaded one, and each to the replica that its session's hash names (that without a gateway,
which would bound its load). Heads are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.fleet.loads import Session
from bench.fleet.stage import Sent, ready, replicas, send, staged
from bench.measure.machine import REPORTS, command, versions
from router.policies.sticky import weight

REPORT = REPORTS / "savings.md"
FLEET, CONCURRENT, THINK_S = 4, 24, 0.02
HEADS, HEAD_WORDS, TURN_WORDS, TURNS = 4, 1400, 180, 8
PREFILL_RATE = 40_000
# A prompt has 5,000 tokens on average: room for those that run at once and little more, and for all.
SIZES = {"small caches": 48_000, "large caches": 400_000}
SHADOWED = "cost"  # the policy under which the others are compared
HASHED = "session"
OTHERS = ("round_robin", "least_loaded", HASHED)


def conversations(count: int, seed: int) -> list[Session]:
    """Each begins with one of the heads; a turn adds words to all before."""
    chance = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(f"w{chance.randrange(10_000)}" for _ in range(number))

    heads = [words(chance.randint(HEAD_WORDS * 2 // 3, HEAD_WORDS * 4 // 3)) for _ in range(HEADS)]
    found = list[Session]()
    for number in range(count):
        prompt, bodies = chance.choice(heads), list[bytes]()
        for _ in range(chance.randint(1, 2 * TURNS)):
            prompt += " " + words(chance.randint(TURN_WORDS // 3, TURN_WORDS * 2))
            body = {"model": "sim", "prompt": prompt, "max_tokens": 8, "prompt_cache_key": f"s{number}"}
            bodies.append(json.dumps(body).encode())
        found.append(bodies)
    return found


async def compared(
    sessions: list[Session], kv_tokens: int, workers: int = 1, policy: str = SHADOWED
) -> tuple[float, dict[str, float]]:
    """Under one policy: the share of prompt tokens that were cached, and by the shadows of each policy."""
    with tempfile.TemporaryDirectory() as folder:
        routing = {"policy": policy, "compare": True}
        simulated = _simulated(kv_tokens)
        async with staged(
            1, Path(folder), shared=False, fleet=FLEET, simulated=simulated, routing=routing, workers=workers
        ) as (made, _):
            sent = await _send(made.urls, sessions)
            return sent.share(), await _shadows(made.urls[0])


async def hashed(sessions: list[Session], kv_tokens: int) -> float:
    """The share of prompt tokens that are cached where each session has a replica of its own."""
    with tempfile.TemporaryDirectory() as folder, replicas(FLEET, Path(folder), _simulated(kv_tokens)) as urls:
        await ready(urls, "/health")
        return (await _send(urls, sessions, place=partial(_hashed, urls))).share()


def _simulated(kv_tokens: int) -> Sequence[str]:
    return ("--engine", "sim", "--kv-tokens", str(kv_tokens), "--prefill-rate", str(PREFILL_RATE), "--decode-rate", "200")


async def _send(urls: Sequence[str], sessions: list[Session], place: Callable[[Session], str] | None = None) -> Sent:
    sent = await send(urls, sessions, concurrent=CONCURRENT, think_s=THINK_S, seed=1, place=place)
    if sent.failed:
        raise SystemExit(f"requests failed: {sent.failed}")
    return sent


def _hashed(urls: Sequence[str], session: Session) -> str:
    key = json.loads(session[0])["prompt_cache_key"].encode()
    return max(urls, key=lambda url: weight(key, url))


async def _shadows(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
        text = await answer.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    total = next(each.value for each in samples if each.name == "warmroute_compared_prompt_tokens_total")
    cached = [each for each in samples if each.name == "warmroute_policy_cached_tokens_total"]
    return {each.labels["policy"]: each.value / total for each in cached}


HEAD = """# What other policies would have found

`{command}`: {count} conversations, {fleet} simulated replicas, workers: {workers}; shares of prompt tokens, the middle one
(by its points) of {runs} runs. {versions}.

- delivered: shadow of the replicas that were chosen, and what their engines reported;
- the others: shadow, corrected by the error of delivered, while the default policy serves (`routing.compare`), and the same
  conversations really sent so. Clients wait for their answers, so under a slower policy the same requests come at other
  times and in another order, of which a shadow knows nothing;
- same order: the shadow of that policy while it serves itself, so of the very requests that are its truth.

| caches | policy | shadow | truth | points | same order | points |
|---|---|--:|--:|--:|--:|--:|
"""

Found = tuple[float, float, float | None]
"""Shadow and truth; the shadow of the same order, None: not known."""


async def main(count: int, workers: int, runs: int, made_by: str) -> str:
    lines = [HEAD.format(count=count, fleet=FLEET, workers=workers, runs=runs, command=made_by, versions=versions())]
    for name, kv_tokens in SIZES.items():
        found = [await _run(conversations(count, 7 + number), kv_tokens, workers) for number in range(runs)]
        for policy in ("delivered", *OTHERS):
            shadow, truth, same = sorted((each[policy] for each in found), key=lambda one: one[0] - one[1])[runs // 2]
            row = f"| {name} | {policy} | {shadow:.1%} | {truth:.1%} | {100 * (shadow - truth):+.1f} |"
            row += "  |  |" if same is None else f" {same:.1%} | {100 * (same - truth):+.1f} |"
            print(row, flush=True)
            lines.append(row + "\n")
    return "".join(lines)


async def _run(sessions: list[Session], kv_tokens: int, workers: int) -> dict[str, Found]:
    """By policy."""
    served, shadows = await compared(sessions, kv_tokens, workers)
    error = shadows["actual"] - served
    found: dict[str, Found] = {"delivered": (shadows["actual"], served, None)}
    for policy in OTHERS:
        same: float | None = None
        if policy == HASHED:
            truth = await hashed(sessions, kv_tokens)
        else:
            truth, own = await compared(sessions, kv_tokens, workers, policy)
            same = own[policy]
        found[policy] = (shadows[policy] - error, truth, same)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=150, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="each with conversations of its own (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, help="(default: %(default)s)")
    options = parser.parse_args()
    command_line = command("bench.fleet.savings", None)
    made = asyncio.run(main(options.conversations, options.workers, options.runs, command_line))
    options.report.write_text(made, "utf-8")
