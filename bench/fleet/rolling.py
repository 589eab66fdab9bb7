"""A rolling restart of several gateways under load, behind a Service (`service.py`).

Each gateway in turn is deleted, as Kubernetes does it: it leaves the Service's endpoints within a second, and gets SIGTERM at
once, or after the sleep of a preStop hook. When it has ended it is started again on its port, and the next one follows when
clients know that it is back. A gateway that has not ended after the grace period is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from bench.fleet.loads import growing
from bench.fleet.service import ADDRESS, Service
from bench.fleet.stage import REPLICAS, GatewayProcess, Gateways, staged

DELAY_S = 1.0  # until clients know of a change of the endpoints
SIMULATED = ("--engine", "sim", "--kv-tokens", "60000", "--prefill-rate", "50000", "--decode-rate", "100")
TURNS = 9
STREAMED_TOKENS = 60, 200, 500  # of answers, at 100 a second
THINK_S = 0.05, 0.3, 3.0  # that clients pause, each one of these on average


@dataclass(frozen=True, slots=True)
class Variant:
    """The shutdown of gateways. pre_stop_s: sleep of the hook. grace_s: from the deletion until the gateway is killed."""

    name: str
    accept_s: float
    pre_stop_s: float = 0.0
    grace_s: float = 50.0
    drain_s: float = 30.0
    shared: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """at: time of the request, in seconds from the beginning."""

    at: float
    prompt: int
    cached: int
    first_s: float


@dataclass(slots=True)
class Result:
    """failed: requests without an answer of status 200, by reason. cut: of streams that had begun. begin, end: of the restarts.
    ends: seconds from the deletion of each gateway to its end. killed: after their grace period.
    """

    answered: list[Answered] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    begin: float = 0.0
    end: float = 0.0
    ends: list[float] = field(default_factory=list)
    killed: int = 0

    @property
    def phases(self) -> Iterable[tuple[str, float, float]]:
        return ("before", 0.0, self.begin), ("during", self.begin, self.end), ("after", self.end, float("inf"))

    def share(self, begin: float, end: float) -> float:
        """Cached tokens of all prompt tokens of what was asked in that time."""
        part = [each for each in self.answered if begin <= each.at < end]
        return sum(each.cached for each in part) / max(1, sum(each.prompt for each in part))

    def first_s(self, begin: float, end: float, quantile: float) -> float:
        """Time to the first byte of the body."""
        part = sorted(each.first_s for each in self.answered if begin <= each.at < end)
        return part[int(quantile * (len(part) - 1))] if part else 0.0


class Clients:
    """Each runs conversations, one turn after the other, until stopped."""

    def __init__(self, service: Service, result: Result) -> None:
        self.begun = time.monotonic()
        self._service = service
        self._result = result
        self._numbers = count()
        self._stopped = asyncio.Event()

    @contextlib.asynccontextmanager
    async def asking(self, plain: int, streams: int) -> AsyncIterator[None]:
        kinds = [False] * plain + [True] * streams
        tasks = [asyncio.create_task(self._client(number, streamed=streamed)) for number, streamed in enumerate(kinds)]
        try:
            yield
        finally:
            self._stopped.set()
            await asyncio.gather(*tasks)

    async def _client(self, number: int, *, streamed: bool) -> None:
        chance = random.Random(number)
        think_s = THINK_S[number % len(THINK_S)]
        skipped = number % TURNS  # so that all turns are asked at any time
        async with self._service.session() as session:
            while not self._stopped.is_set():
                bodies, skipped = growing(next(self._numbers), TURNS)[skipped:], 0
                for body in bodies:
                    tokens = chance.choice(STREAMED_TOKENS) if streamed else 4
                    await self._ask(session, {**json.loads(body), "max_tokens": tokens}, streamed=streamed)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(chance.expovariate(1 / think_s)):
                            await self._stopped.wait()
                    if self._stopped.is_set():
                        return

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], *, streamed: bool) -> None:
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        asked, first_s, text, status = time.monotonic(), 0.0, b"", 0
        try:
            async with session.post(f"{ADDRESS}/v1/completions", json=body) as answer:
                status = answer.status
                async for piece in answer.content.iter_any():
                    first_s = first_s or time.monotonic() - asked
                    text += piece
            problem = _problem(status, text, streamed=streamed)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = type(error).__name__
        if problem:
            (self._result.cut if status == 200 else self._result.failed)[problem] += 1
        else:
            self._result.answered.append(Answered(asked - self.begun, *_usage(text, streamed=streamed), first_s))


def _problem(status: int, text: bytes, *, streamed: bool) -> str:
    """ "": it is a whole answer."""
    if status != 200:
        return f"status {status}"
    whole = not streamed or text.endswith(b"data: [DONE]\n\n")
    return "" if whole and b'"error"' not in text else "incomplete"


def _usage(text: bytes, *, streamed: bool) -> tuple[int, int]:
    """Prompt tokens, cached tokens."""
    last = text.split(b"\n\n")[-3].partition(b"data: ")[2] if streamed else text
    usage = json.loads(last)["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True, slots=True)
class Scale:
    """plain, streams: clients; each has one connection. calm_s: before the restarts, after warm_s, and after them."""

    gateways: int = 4
    fleet: int = REPLICAS
    plain: int = 16
    streams: int = 8
    warm_s: float = 10.0
    calm_s: float = 30.0


async def rolling(variant: Variant, folder: Path, scale: Scale) -> Result:
    limits = {"drain_accept_s": variant.accept_s, "drain_timeout_s": variant.drain_s}
    settings: dict[str, Any] = {"fleet": scale.fleet, "simulated": SIMULATED, "limits": limits}
    result = Result()
    async with staged(scale.gateways, folder, shared=variant.shared, **settings) as (made, _):
        service = Service(made.each, DELAY_S, random.Random(1))
        clients = Clients(service, result)
        async with service.watched(), clients.asking(scale.plain, scale.streams):
            await asyncio.sleep(scale.warm_s)
            clients.begun = time.monotonic()
            result.answered.clear()
            await asyncio.sleep(scale.calm_s)
            result.begin = time.monotonic() - clients.begun
            await _restart_each(made, service, variant, result)
            result.end = time.monotonic() - clients.begun
            await asyncio.sleep(scale.calm_s)
    return result


async def _restart_each(made: Gateways, service: Service, variant: Variant, result: Result) -> None:
    for gateway in made.each:
        deleted = time.monotonic()
        await _delete(gateway, service, variant, result)
        result.ends.append(time.monotonic() - deleted)
        service.deleted.discard(gateway.port)
        gateway.start()
        await service.until(gateway.port, endpoint=True)


async def _delete(gateway: GatewayProcess, service: Service, variant: Variant, result: Result) -> None:
    due = time.monotonic() + variant.grace_s
    service.deleted.add(gateway.port)
    await asyncio.sleep(variant.pre_stop_s)
    gateway.terminate()
    if not await gateway.ended(due - time.monotonic()):
        result.killed += 1
