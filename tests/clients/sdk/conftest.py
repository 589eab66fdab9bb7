"""A gateway in front of our own simulated replica: one that speaks all three APIs, and one that speaks chat alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.clients.sdk.engines import simulated
from tests.clients.sdk.tap import Tapped
from tests.gateway.conftest import Running, request_lines, running

__all__ = ["request_lines"]


@pytest.fixture(params=["native", "translated"])
async def over_sim(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with simulated(chat_only=request.param == "translated") as url, running(url) as run:
        yield run


@pytest.fixture
async def clients(over_sim: Running) -> AsyncIterator[Tapped]:
    """All that they have been sent is checked at the end."""
    tapped = Tapped(over_sim.url)
    yield tapped
    tapped.check()
