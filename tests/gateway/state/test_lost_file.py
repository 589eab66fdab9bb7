"""SQLite's file is deleted or replaced while it is open, and work in it that is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, make_url
from sqlalchemy.exc import OperationalError

from gateway.database.database import STALL_S, Database
from gateway.database.driver import CONNECTIONS
from gateway.database.failures import StoreFailed
from gateway.database.sqlite_file import SqliteFile
from gateway.features.histories.records import Unknown
from gateway.features.histories.tables import TABLES
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, file_url, opened, pausing, response

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
LOSSES = list[int]
SHORT_S = 1.0  # of an operation, where one is to be given up


@contextlib.asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[RunStore, LOSSES]]:
    losses = LOSSES()
    database = Database(file_url(path), TABLES, lost=lambda: losses.append(1))
    await database.open()
    store = RunStore(database, TTL_S, Clock())
    try:
        yield store, losses
    finally:
        await store.close()


def ids_in(path: Path) -> list[str]:
    """By somebody who opens the file of this name."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return [row[0] for row in file.execute("SELECT id FROM warmroute_responses ORDER BY id")]


async def impatient(path: Path, clock: Clock) -> Database:
    """Open, with its tables: to make them may take longer on a slow disk."""
    async with opened(file_url(path)):
        pass
    database = Database(file_url(path), TABLES, SHORT_S, clock)
    await database.open()
    return database


def delete(path: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        os.unlink(f"{path}{suffix}")


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal", "-shm")])
async def test_a_file_that_is_deleted_is_made_anew(
    tmp_path: Path, suffixes: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.sqlite"
    async with watched(path) as (store, losses):
        await store.put(response("a"))
        delete(path, *suffixes)
        with caplog.at_level(logging.ERROR, "warmroute.database"):
            await store.put(response("b", "a"))
        assert ids_in(path) == ["b"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(Unknown):
            await store.get("o", "a")
        with pytest.raises(Unknown, match="a"):
            await store.chain("o", "b", 1 << 30)
        assert len(losses) == 1
        assert [each.levelname for each in caplog.records if "deleted or replaced" in each.message] == ["ERROR"]
    async with opened(file_url(path)) as again:
        assert await again.get("o", "b")


async def test_a_read_notices_it_as_well(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with watched(path) as (store, losses):
        await store.put(response("a"))
        path.unlink()
        with pytest.raises(Unknown):
            await store.get("o", "a")
        assert ids_in(path) == []
        assert len(losses) == 1


def test_a_file_that_goes_just_before_it_is_read_is_not_made_by_sqlite(tmp_path: Path) -> None:
    """It would be empty, and others could read what comes into it."""
    path = tmp_path / "a.sqlite"
    file = SqliteFile(make_url(file_url(path)), TABLES)
    try:
        path.unlink()
        with pytest.raises(OperationalError, match="unable to open"), file.reading():
            pass
        assert not path.exists()
    finally:
        file.close()


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


async def test_a_file_that_is_replaced_is_read_without_the_log_of_the_one_before(tmp_path: Path) -> None:
    """The log would be written over its pages."""
    path, other = tmp_path / "a.sqlite", tmp_path / "other.sqlite"
    async with opened(file_url(other)) as store:
        await asyncio.gather(*(store.put(response(f"x{at}", size=3000)) for at in range(50)))
    async with watched(path) as (store, losses):
        for at in range(20):
            await store.put(response(f"a{at}", size=3000))
        other.replace(path)
        await store.put(response("b"))
        assert ids_in(path) == sorted(["b", *(f"x{at}" for at in range(50))])
        assert await store.get("o", "x7") == response("x7", size=3000)
        assert len(losses) == 1


async def test_a_log_that_is_deleted_alone_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with watched(path) as (store, losses):
        await store.put(response("a"))
        delete(path, "-wal", "-shm")
        await store.put(response("b", "a"))
        assert ids_in(path) == ["a", "b"]
        assert len(losses) == 1


async def test_what_is_written_while_the_file_goes_is_written_again(tmp_path: Path) -> None:
    """In the middle of the transaction, which SQLite commits all the same."""
    path = tmp_path / "a.sqlite"
    async with watched(path) as (store, losses):
        times = 0

        def work(connection: Connection) -> int:
            nonlocal times
            times += 1
            if times == 1:
                path.unlink()
            connection.exec_driver_sql("INSERT INTO warmroute_runs VALUES ('o', 'a', 'me', 1)")
            return times

        assert await store._database.write(work) == 2
        with contextlib.closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT id FROM warmroute_runs").fetchall() == [("a",)]
        assert len(losses) == 1


async def test_a_file_that_goes_every_time_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with watched(path) as (store, _):
        with pytest.raises(StoreFailed, match="again and again"):
            await store._database.write(lambda _: path.unlink())
        await store.put(response("a"))
        assert ids_in(path) == ["a"]


async def test_a_file_that_cannot_be_made_anew_is_an_error_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    path = folder / "a.sqlite"
    async with watched(path) as (store, losses):
        await store.put(response("a"))
        folder.rename(tmp_path / "away")
        folder.touch()
        for work in (store.put(response("b")), store.get("o", "a")):
            with pytest.raises(StoreFailed):
                await work
        folder.unlink()
        await store.put(response("c"))
        assert ids_in(path) == ["c"]
        assert len(losses) == 1
    assert ids_in(tmp_path / "away" / "a.sqlite") == ["a"], "it is as it was"


@pytest.mark.parametrize("suffixes", [("",), ("-wal", "-shm")])
async def test_reads_in_a_file_that_is_lost_end_first(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    """Else two connections of this process have one file with two logs."""
    path, free, loop = tmp_path / "a.sqlite", asyncio.Event(), asyncio.get_running_loop()
    entered = asyncio.Event()

    async def waits() -> None:
        entered.set()
        await free.wait()

    def work(connection: Connection) -> list[Any]:
        pausing(connection, waits(), loop)
        return [row.id for row in connection.exec_driver_sql("SELECT id FROM warmroute_responses")]

    async with watched(path) as (store, losses):
        await store.put(response("a"))
        reading = asyncio.create_task(store._database.read(work))
        await entered.wait()
        delete(path, *suffixes)
        others = [asyncio.create_task(each) for each in (store.put(response("b")), store.delete("o", "a"))]
        gets = [asyncio.create_task(store.get("o", "never")) for _ in range(CONNECTIONS)]
        await asyncio.sleep(0)
        free.set()
        assert await reading == ["a"]
        assert await asyncio.gather(*others) == [True, suffixes[0] != ""]
        assert {type(each) for each in await asyncio.gather(*gets, return_exceptions=True)} == {Unknown}
        assert ids_in(path) == ["b"]
        assert len(losses) == 1


async def test_reads_that_are_given_up_are_interrupted(tmp_path: Path) -> None:
    """As many as there are threads: all of them are free afterwards."""
    clock = Clock()
    database = await impatient(tmp_path / "a.sqlite", clock)
    try:
        works = [database.read(lambda each: each.exec_driver_sql(ENDLESS).all()) for _ in range(CONNECTIONS - 1)]
        assert {type(each) for each in await asyncio.gather(*works, return_exceptions=True)} == {StoreFailed}
        clock.now += STALL_S
        for _ in range(2 * CONNECTIONS):
            assert await database.read(lambda each: each.exec_driver_sql("SELECT 1").scalar()) == 1
    finally:
        await database.close()


@pytest.mark.parametrize("where", ["in a statement", "between two"])
async def test_a_write_that_is_given_up_is_not_written(tmp_path: Path, where: str) -> None:
    clock, path, free, loop = Clock(), tmp_path / "a.sqlite", asyncio.Event(), asyncio.get_running_loop()
    database = await impatient(path, clock)

    def work(connection: Connection) -> None:
        connection.exec_driver_sql("INSERT INTO warmroute_runs VALUES ('o', 'a', 'me', 1)")
        if where == "between two":
            pausing(connection, free.wait(), loop)
        else:
            connection.exec_driver_sql(ENDLESS).all()

    try:
        with pytest.raises(StoreFailed, match="not answered"):
            await database.write(work)
        await database._queue.join()  # its time is the writer's as well
        free.set()
        clock.now += STALL_S
        await RunStore(database, TTL_S).put(response("b"))
        with contextlib.closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT id FROM warmroute_runs").fetchall() == []
    finally:
        await database.close()
    assert ids_in(path) == ["b"]


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
