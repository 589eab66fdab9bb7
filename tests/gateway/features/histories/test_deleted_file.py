"""SQLite's file: deleted or replaced while it is open, its names, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, make_url

from gateway.database.database import Database
from gateway.database.driver import CONNECTIONS
from gateway.database.failures import StoreFailed
from gateway.database.sqlite_file import SqliteFile
from gateway.features.histories.tables import TABLES
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, file_url, opened, pausing, response


def ids_in(path: Path) -> list[str]:
    """By somebody who opens the file of this name."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [row[0] for row in file.execute("SELECT id FROM warmroute_responses ORDER BY id")]


async def refusing(path: Path, change: Callable[[], object]) -> list[int]:
    """A store whose file has two responses, and is changed then: all that follows is refused. Returns the calls of `lost`."""
    losses = list[int]()
    database = Database(file_url(path), TABLES, lost=lambda: losses.append(1))
    await database.open()
    store = RunStore(database, TTL_S, Clock(), ResponseRuns())
    try:
        for name in "ab":
            await store.put(response(name, size=3000))
        change()
        for _ in range(3):
            with pytest.raises(StoreFailed, match="deleted or replaced"):
                await store.put(response("c"))
            with pytest.raises(StoreFailed, match="deleted or replaced"):
                await store.get("o", "a")
    finally:
        await store.close()
    return losses


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal", "-shm")])
async def test_a_file_that_is_deleted_is_made_anew_by_a_restart(
    tmp_path: Path, suffixes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.sqlite"

    def delete() -> None:
        for suffix in suffixes:
            os.unlink(f"{path}{suffix}")

    assert len(await refusing(path, delete)) == 1
    assert [each.levelname for each in caplog.records if "deleted or replaced" in each.message] == ["ERROR"]
    async with opened(file_url(path)) as store:
        await store.put(response("d"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ids_in(path) == ["d"]


async def test_a_file_that_is_replaced_is_used_after_a_restart(tmp_path: Path) -> None:
    """Without the log of the one before, which SQLite would write over its pages."""
    path, other = tmp_path / "a.sqlite", tmp_path / "other.sqlite"
    async with opened(file_url(other)) as store:
        await asyncio.gather(*(store.put(response(f"x{at}", size=3000)) for at in range(50)))
    assert len(await refusing(path, lambda: other.replace(path))) == 1
    async with opened(file_url(path)) as store:
        await store.put(response("d"))
        assert await store.get("o", "x7") == response("x7", size=3000)
    assert ids_in(path) == sorted(["d", *(f"x{at}" for at in range(50))])


async def test_a_write_whose_file_goes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    database = Database(file_url(path), TABLES)
    await database.open()
    try:
        with pytest.raises(StoreFailed, match="deleted or replaced"):
            await database.write(lambda _: path.unlink())
    finally:
        await database.close()


@pytest.mark.parametrize("name", ["a b?c#d%20e.sqlite", "\u00e4.sqlite", os.fsdecode(b"\xff.sqlite")])
def test_names_of_files_that_mean_something_in_a_url(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file = SqliteFile(make_url("sqlite://").set(database=os.fspath(path)), TABLES)
    try:
        with file.reading() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM warmroute_responses").scalar() == 0
    finally:
        file.close()
    assert os.listdir(tmp_path) == [name]


async def test_what_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    """Reads that wait for a place while it is closed, too."""
    entered, free, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    async def waits() -> None:
        entered.set()
        await free.wait()

    def work(connection: Connection) -> Any:
        pausing(connection, waits(), loop)
        return connection.exec_driver_sql("SELECT 1").scalar()

    database = Database(file_url(tmp_path / "a.sqlite"), TABLES)
    await database.open()
    reads = [asyncio.create_task(database.read(work)) for _ in range(2 * (CONNECTIONS - 1))]
    await entered.wait()
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    free.set()
    results = await asyncio.gather(*reads, return_exceptions=True)
    await closing
    assert results[: CONNECTIONS - 1] == [1] * (CONNECTIONS - 1)
    assert [str(each) for each in results[CONNECTIONS - 1 :]] == ["the database is closed"] * (CONNECTIONS - 1)
    for late in (database.read(work), database.write(work)):
        with pytest.raises(StoreFailed, match="is closed"):
            await late
    assert os.listdir(tmp_path) == ["a.sqlite"], "its log was written back"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_database_in_memory_keeps_nothing(url: str) -> None:
    with pytest.raises(StoreFailed, match="path of a file"):
        Database(url, TABLES)
