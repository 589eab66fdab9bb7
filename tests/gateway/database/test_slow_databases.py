"""A database that is slower than its callers want does what it can, instead of everything too late."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from gateway.database.database import FIRST_BATCH, MAX_BATCH, BatchSize, Database
from gateway.database.failures import StoreFailed
from gateway.features.histories.tables import TABLES


def test_transactions_grow_while_they_are_short_and_shrink_when_they_are_long() -> None:
    size = BatchSize(long_s=2.5)
    for _ in range(10):
        size.after(size.most, 0.1)
    assert size.most == MAX_BATCH
    size.after(1, 0.1)  # it was not full: nothing is learned
    assert size.most == MAX_BATCH
    size.after(60, 10.0, failed=True)
    assert size.most == 30
    size.after(30, 0.0, failed=True)  # it was refused at once
    assert size.most == 30
    for _ in range(10):
        size.after(size.most, 3.0)
    assert size.most == 1
    size.after(1, 2.0)
    assert size.most == 2


async def test_writes_that_take_too_long_together_are_done_in_smaller_transactions(tmp_path: Path) -> None:
    each_s, limit_s = 0.1, 2.0
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES, operation_s=limit_s)
    await database.open()

    def slow(_connection: Connection) -> str:
        time.sleep(each_s)
        return "done"

    try:
        writes = [database.write(slow) for _ in range(int(1.5 * limit_s / each_s))]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert results.count("done") >= FIRST_BATCH
    finally:
        await database.close()


async def test_a_migration_may_take_longer_than_an_operation(tmp_path: Path) -> None:
    """It changes all rows, and would be tried for ever."""
    limit_s = 0.5
    made = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES)
    await made.open()
    await made.close()

    def slow(_connection: Connection) -> None:
        time.sleep(2 * limit_s)

    later = replace(TABLES, version=TABLES.version + 1, migrations={**TABLES.migrations, TABLES.version: slow})
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", later, operation_s=limit_s)
    await database.open()
    await database.close()
    with pytest.raises(StoreFailed, match="later release"):
        await made.open()


async def test_a_write_waits_for_its_transaction_although_it_waited_long_for_another_one(tmp_path: Path) -> None:
    limit_s = 2.0
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES, operation_s=limit_s)
    await database.open()
    running, free = threading.Event(), threading.Event()

    def first(_connection: Connection) -> None:
        running.set()
        free.wait()

    def second(_connection: Connection) -> str:
        time.sleep(max(0.0, late - time.monotonic()))
        return "done"

    try:
        one = asyncio.create_task(database.write(first))
        await asyncio.to_thread(running.wait)
        late = time.monotonic() + limit_s + 0.2
        other = asyncio.create_task(database.write(second))
        asyncio.get_running_loop().call_later(limit_s / 2, free.set)
        await one
        assert await other == "done"
    finally:
        free.set()
        await database.close()


async def test_a_write_that_failed_may_be_stored_only_if_its_transaction_had_begun(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES, operation_s=0.5)
    await database.open()
    free = threading.Event()
    try:
        with pytest.raises(StoreFailed) as begun:
            await database.write(lambda _connection: free.wait())
        with pytest.raises(StoreFailed) as refused:
            await database.write(lambda _connection: None)
        assert (begun.value.in_doubt, refused.value.in_doubt) == (True, False)
    finally:
        free.set()
        await database.close()
