"""Conversations of many users through a gateway to simulated replicas with real caches: how much of the prompts was cached?

Each user sends, reads, waits and sends again, on a new connection each time, so that any of several workers may get it.
Texts depend on nothing but the seed; so runs differ only in where requests go. Working set and caches are so that a fleet which
keeps conversations together has room for them, and one that does not has none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

HEADS, HEAD_WORDS = 8, 400
TURNS, TURN_WORDS = 6, 300
THINK_S = 0.05, 0.6
ANSWER_TOKENS = 8


@dataclass(slots=True)
class CrowdResult:
    """The replicas' usage of all answers. first: seconds to the whole (short) answer."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / max(1, len(self.seconds))


def words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(10**5):05d}" for _ in range(count))


async def crowd(url: str, *, users: int, requests: int, seed: int) -> CrowdResult:
    """users at a time, `requests` of each."""
    heads = [words(random.Random(f"{seed}/head {number}"), HEAD_WORDS) for number in range(HEADS)]
    result = CrowdResult()
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        asking = (_user(session, url, heads, requests, random.Random(f"{seed}/user {user}"), result) for user in range(users))
        await asyncio.gather(*asking)
    return result


async def _user(
    session: aiohttp.ClientSession, url: str, heads: Sequence[str], requests: int, chance: random.Random, result: CrowdResult
) -> None:
    messages: list[dict[str, str]] = []
    for number in range(requests):
        if number % TURNS == 0:
            messages = [{"role": "system", "content": chance.choice(heads)}]
        messages.append({"role": "user", "content": words(chance, TURN_WORDS)})
        await asyncio.sleep(chance.uniform(*THINK_S))
        body = {"model": "sim", "messages": messages, "max_tokens": ANSWER_TOKENS}
        begun = asyncio.get_running_loop().time()
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            result.errors.append(str(answer))
            continue
        result.seconds.append(asyncio.get_running_loop().time() - begun)
        result.requests += 1
        result.prompt_tokens += answer["usage"]["prompt_tokens"]
        result.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
