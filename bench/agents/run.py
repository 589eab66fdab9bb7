"""One run: conversations of one kind through one system to stand-ins with empty caches.

Every conversation is a separate client, which asks, reads, thinks and asks again; `concurrent` of them run in parallel. The
stand-ins find each turn's tag in its prompt, and report the replica and the cached tokens of the turn, independent of changes
to headers and ids by the system. A conversation ends at its first error.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson

from bench.agents.dialogues import Dialogue, Head, Shape, head
from bench.agents.engine import Model, Row
from bench.agents.kinds import Kind
from bench.agents.reading import Failed, Reply, read
from bench.gateway.systems import System, started
from bench.measure.cpu import cores, pinned

STAGGER_S = 1.0  # the first conversations begin within it
ANSWER_S = 120.0  # a request that takes longer has failed
_SAMPLE = re.compile(r"^warmroute_(prompt_tokens_total|unmetered_requests_total)\{([^}]*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The load and its target. think_s: mean pause before a turn. answer_tokens: of each answer."""

    conversations: int = 24
    turns: int = 6
    concurrent: int = 12
    think_s: float = 0.3
    answer_tokens: int = 48
    shape: Shape = field(default_factory=Shape)
    replicas: int = 4
    model: Model = field(default_factory=Model)
    engine: str = "vllm"
    keep: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Metered:
    """Counts of the gateway's /metrics in the run: prompt tokens, cached and not; generations without usage."""

    hit: int
    miss: int
    unmetered: int


@dataclass(slots=True)
class Score:
    """ttft: seconds, of each good answer. later, stayed: turns after a conversation's first, and those that went to where the
    one before it was; lost: later ones (their tags) that failed. prompt, cached: tokens as the stand-ins count them; told: the
    same as the answers' usage has them.
    """

    system: str
    kind: str
    sent: int = 0
    later: int = 0
    stayed: int = 0
    lost: list[str] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    told: tuple[int, int] = (0, 0)
    ttft: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    metered: Metered | None = None

    @property
    def refused(self) -> str:
        """Why no conversation came to a second turn, "" if one did."""
        if self.later > len(self.lost):
            return ""
        return next((reason for reason, _ in self.errors.most_common(1)), "no answer")

    @property
    def stay_share(self) -> float:
        return self.stayed / max(1, self.later)

    @property
    def cached_share(self) -> float:
        return self.cached / max(1, self.prompt)


def run(system: System, kind: Kind, plan: Plan, folder: Path) -> Score:
    """Raises NotStarted."""
    system_cores, load_cores = cores()
    score = Score(system.name, kind.name)
    with standins(plan, load_cores) as urls, started(system, urls, folder, system_cores) as running, pinned(load_cores):
        url = f"http://127.0.0.1:{running.port}"
        before = metered(url)
        asyncio.run(Load(url, kind, plan, score).run())
        after = metered(url)
        tally(score, [row for row in rows(urls[0]) if row.tag])
    if before and after:
        score.metered = Metered(after.hit - before.hit, after.miss - before.miss, after.unmetered - before.unmetered)
    return score


@contextlib.contextmanager
def standins(plan: Plan, on: set[int]) -> Iterator[list[str]]:
    """Their base URLs; they run while the context does."""
    flags: Mapping[str, object] = {
        "--replicas": plan.replicas,
        "--kv-tokens": plan.model.kv_tokens,
        "--prefill-rate": plan.model.prefill_rate,
        "--decode-rate": plan.model.decode_rate,
        "--engine": plan.engine,
        "--answer-tokens": plan.answer_tokens,
    }
    words = [str(word) for flag in flags.items() for word in flag] + ["--keep"] * plan.keep
    with pinned(on):
        process = subprocess.Popen([sys.executable, "-m", "bench.agents.standin", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield [f"http://127.0.0.1:{int(process.stdout.readline())}" for _ in range(plan.replicas)]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def rows(standin: str) -> list[Row]:
    """What all stand-ins have computed."""
    with urllib.request.urlopen(f"{standin}/bench/rows") as answer:
        return [Row(**row) for row in orjson.loads(answer.read())]


def metered(url: str) -> Metered | None:
    """Of a system that has our metrics."""
    try:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            page = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None
    found = Counter[str]()
    for name, labels, value in _SAMPLE.findall(page):
        cache = "hit" if 'cache="hit"' in labels else "miss"
        found[cache if name == "prompt_tokens_total" else "unmetered"] += int(float(value))
    return Metered(found["hit"], found["miss"], found["unmetered"]) if "warmroute_" in page else None


def tally(score: Score, found: Sequence[Row]) -> None:
    """A turn that was computed twice counts where it was last; one that failed has not stayed."""
    where = {row.tag: row.replica for row in found}
    for tag, replica in where.items():
        conversation, _, turn = tag.partition(".")
        before = where.get(f"{conversation}.{int(turn) - 1}")
        if before is not None and tag not in score.lost:
            score.later += 1
            score.stayed += before == replica
    score.later += len(score.lost)
    score.prompt = sum(row.prompt for row in found)
    score.cached = sum(row.cached for row in found)


class Load:
    """The clients."""

    def __init__(self, url: str, kind: Kind, plan: Plan, score: Score) -> None:
        self._url = url + kind.path
        self._kind = kind
        self._plan = plan
        self._score = score
        self._head: Head = head(plan.shape, plan.seed)
        self._waiting = iter(range(plan.conversations))

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._plan.concurrent)))

    async def _client(self, number: int) -> None:
        await asyncio.sleep(STAGGER_S * number / self._plan.concurrent)
        for conversation in self._waiting:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await self._converse(session, Dialogue(conversation, self._plan.shape, self._plan.seed))

    async def _converse(self, session: aiohttp.ClientSession, dialogue: Dialogue) -> None:
        chance = random.Random(f"{self._plan.seed}/client {dialogue.number}")
        for number in range(self._plan.turns):
            if number:
                await asyncio.sleep(min(chance.expovariate(1 / self._plan.think_s), 4 * self._plan.think_s))
            dialogue.ask()
            try:
                reply = await self._turn(session, dialogue, chance)
            except (Failed, aiohttp.ClientError, TimeoutError) as error:
                self._score.errors[str(error) or type(error).__name__] += 1
                self._score.lost += [dialogue.tag] if number else []
                return
            dialogue.answered(reply.entry, reply.identity)

    async def _turn(self, session: aiohttp.ClientSession, dialogue: Dialogue, chance: random.Random) -> Reply:
        score, now = self._score, asyncio.get_running_loop().time
        body, headers = self._kind.write(dialogue, self._head, self._plan.answer_tokens, chance)
        raw = orjson.dumps(body)
        score.sent += 1
        begun = now()
        async with self._post(session, raw, headers) as response:
            reply = await read(response, now)
        score.ttft.append(reply.first - begun)
        if reply.usage:
            score.told = score.told[0] + reply.usage[0], score.told[1] + reply.usage[1]
        return reply

    @contextlib.asynccontextmanager
    async def _post(
        self, session: aiohttp.ClientSession, raw: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with session.post(self._url, data=raw, headers={**headers, "Content-Type": "application/json"}) as response:
            yield response
