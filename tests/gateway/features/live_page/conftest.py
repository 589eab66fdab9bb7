"""The live page in a browser, in front of a gateway of one worker or two, with replicas that answer."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from playwright.async_api import Browser

from tests.gateway.conftest import Running, running
from tests.gateway.features.workers.conftest import star
from tests.support.browser import Scheme, Tab, browsing, tab
from tests.support.fakes import FakeReplica, answers

PRICES = {"*": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}
HEADS = ["You are a coding agent. " * 80, "You answer customers of a shop. " * 60, "You review changes of code. " * 70]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as made:
        yield made


@contextlib.asynccontextmanager
async def fleet(workers: int = 1, **config: Any) -> AsyncIterator[tuple[list[Running], list[FakeReplica]]]:
    """Gateways, one for each worker; replicas, which report cached tokens."""
    config = {"prices": PRICES, **config}
    async with FakeReplica([answers(prompt=900, cached=300)]) as one, FakeReplica([answers(prompt=900, cached=300)]) as other:
        if workers == 1:
            async with running(one, other, **config) as run:
                yield [run], [one, other]
            return
        async with star(one, other, workers=workers, **config) as (_, made):
            yield [each.run for each in made], [one, other]


@contextlib.asynccontextmanager
async def opened(
    browser: Browser, run: Running, fragment: str = "", scheme: Scheme = "light", size: Any = None
) -> AsyncIterator[Tab]:
    """The page, which has complained of nothing at the end."""
    async with tab(browser, run.admin_url, scheme, size) as made:
        await made.page.goto(f"{run.admin_url}/warmroute/ui/{fragment}")
        yield made
        made.check()


async def converse(run: Running, head: int = 0, tail: str = "a", **headers: str) -> None:
    messages = [{"role": "system", "content": HEADS[head]}, {"role": "user", "content": f"{tail} question " * 60}]
    status, _, answer = await run.post({"model": "m", "messages": messages}, headers=headers)
    assert status == 200, answer
