"""The share of one owner: its own maximum, and two processes that fill it at once."""

from __future__ import annotations

import asyncio
import sys

import pytest

from gateway.database.database import Database
from gateway.features.histories.purging import TOMBSTONE_S
from gateway.features.histories.records import StoreFullError
from gateway.features.histories.sizes import StoredSizes
from gateway.features.histories.tables import ROW, TABLES
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response
from tests.gateway.features.histories.filling import REFUSALS
from tests.gateway.features.histories.test_sizes import agrees, counted

MOST = 40_000


async def test_an_owner_has_a_maximum_of_its_own(url: str) -> None:
    database = Database(url, TABLES)
    await database.open()
    store = RunStore(database, TTL_S, Clock(), ResponseRuns(), StoredSizes(40_000, 3_000))
    try:
        await store.put(response("a", size=1_000))
        with pytest.raises(StoreFullError, match=r"3,000 bytes.*state\.owner_mb") as refused:
            await store.put(response("b", size=2_000))
        assert refused.value.of_owner
        assert await store.put(response("b", owner="p", size=2_000)), "another owner has its own"
        await agrees(store)
    finally:
        await store.close()


async def test_two_gateways_that_purge_at_once_count_each_row_once(url: str) -> None:
    """There are more rows than in a step, so a second step of one may meet the first step of the other."""
    clock = Clock()
    async with opened(url, clock) as one, opened(url, clock) as other:
        for number in range(1_300):
            await one.put(response(f"r{number}", size=50))
        await one.put(response("stays", owner="p"))
        for seconds in (TTL_S + 1, TOMBSTONE_S + 1):  # emptied, then deleted
            clock.now += seconds
            while sum(await asyncio.gather(one.purge(), other.purge())):
                pass
            await agrees(one)


async def test_two_processes_that_fill_a_share_at_once_count_its_sum(url: str) -> None:
    async with opened(url):
        pass  # the tables are there
    module = "tests.gateway.features.histories.filling"
    command = [sys.executable, "-m", module, url]
    pipe = asyncio.subprocess.PIPE
    both = [await asyncio.create_subprocess_exec(*command, seed, str(MOST), stdout=pipe) for seed in ("a", "b")]
    printed = [(await process.communicate())[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert max(map(int, printed)) == REFUSALS, "the share was full"
    async with opened(url) as store:
        await agrees(store)
        sizes = await store.database.read(counted)
        assert MOST // 4 < sizes["o"] <= MOST + ROW
