"""Clients of a gateway under constant load, some with streams, and what became of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from tests.support.flapping.pods import Truth

CLIENTS: Final = 4  # of each pool
PAUSE_S: Final = 0.03
CONVERSATIONS: Final = 12


@dataclass
class Fates:
    """unserved: failed while no pod was well that had to be known. cut: streams whose process may have crashed.

    stalled_s: for how long this process did nothing, at most.
    """

    answered: int = 0
    streams: int = 0
    unserved: int = 0
    cut: int = 0
    stalled_s: float = 0.0
    failed: list[str] = field(default_factory=list)


class Load:
    def __init__(self, url: str, truth: Truth) -> None:
        self.fates = Fates()
        self._url = url
        self._truth = truth
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def on(self, *pools: str) -> AsyncIterator[None]:
        """Until the end of the block, and then until the last answer."""
        ends = asyncio.Event()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            group.create_task(self._watch_stalls(ends))
            for pool in pools * CLIENTS:
                group.create_task(self._client(session, pool, ends))
            try:
                yield
            finally:
                ends.set()

    async def _watch_stalls(self, ends: asyncio.Event) -> None:
        while not ends.is_set():
            begun = self._truth.clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await ends.wait()
            self.fates.stalled_s = max(self.fates.stalled_s, self._truth.clock() - begun - PAUSE_S)

    async def _client(self, session: aiohttp.ClientSession, pool: str, ends: asyncio.Event) -> None:
        while not ends.is_set():
            await self._request(session, pool, next(self._numbers))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await ends.wait()

    async def _request(self, session: aiohttp.ClientSession, pool: str, number: int) -> None:
        begun, stream = self._truth.clock(), number % 5 == 0
        history = f"Conversation {number % CONVERSATIONS} of {pool}. " * 40
        body = {"model": pool, "stream": stream, "messages": [{"role": "user", "content": f"{history}{number}"}]}
        try:
            why, began = await self._answer(session, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            why, began = f"{type(error).__name__}: {error}", True
        if not why:
            self.fates.answered += not stream
            self.fates.streams += stream
        elif began and self._truth.crashed_since(pool, begun):
            self.fates.cut += 1
        elif not self._truth.could_answer(pool, begun):
            self.fates.unserved += 1
        else:
            self.fates.failed.append(f"at {begun:.3f} for {self._truth.clock() - begun:.3f} s, {pool}: {why}")

    async def _answer(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[str, bool]:
        """(what is wrong with it, whether it is a stream that had begun)."""
        async with session.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                return f"{answer.status} {text[:300]}", False
            if not body["stream"]:
                return ("" if '"hello"' in text else text[:300]), False
            good = text.endswith("data: [DONE]\n\n") and '"error"' not in text
            return ("" if good else f"stream ends with {text[-300:]!r}"), True
