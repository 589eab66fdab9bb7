"""The screens, without a terminal, in front of a real gateway with two replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from textual.pilot import Pilot

from gateway.commands.top.screens.app import Top
from gateway.commands.top.screens.tables import Rows
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica, answers
from tests.support.screens import shown

PRICES = {"*": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}
HEAD = "You are a coding agent. " * 80


@dataclass(slots=True)
class Screen:
    app: Top
    pilot: Pilot[int]

    @property
    def text(self) -> str:
        return shown(self.app)

    async def until(self, condition: Callable[[], object]) -> None:
        """The screen is drawn meanwhile."""
        async with asyncio.timeout(40):
            while not condition():
                await self.pilot.pause(0.02)

    async def shows(self, *texts: str) -> None:
        """All of them, at once."""
        try:
            await self.until(lambda: all(text in self.text for text in texts))
        except TimeoutError:
            raise AssertionError(f"{texts} not in\n{self.text}") from None

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        await self.press(*({" ": "space", "-": "minus", ".": "full_stop"}.get(char, char) for char in text))

    def rows(self, id_: str) -> list[list[str]]:
        """Of a table."""
        return self.app.screen.query_one(f"#{id_}", Rows).texts


@contextlib.asynccontextmanager
async def opened(admin: str, width: int = 120, height: int = 36, **env: str) -> AsyncIterator[Screen]:
    app = Top(admin, env)
    async with app.run_test(size=(width, height), notifications=True) as pilot:
        yield Screen(app, pilot)
    await asyncio.to_thread(app.feed.join, 40)


@contextlib.asynccontextmanager
async def fleet(**config: Any) -> AsyncIterator[tuple[Running, list[FakeReplica]]]:
    """Replicas which report cached tokens."""
    replies = [answers(prompt=900, cached=300)]
    async with (
        FakeReplica(replies) as one,
        FakeReplica(replies) as other,
        running(one, other, **{"prices": PRICES, **config}) as run,
    ):
        yield run, [one, other]


async def converse(run: Running, tail: str = "a", **headers: str) -> None:
    messages = [{"role": "system", "content": HEAD}, {"role": "user", "content": f"{tail} question " * 60}]
    status, _, answer = await run.post({"model": "m", "messages": messages}, headers=headers)
    assert status == 200, answer
