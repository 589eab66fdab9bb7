"""A database that another process holds is left alone until it is free: only one operation waits for it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from gateway.database.database import Database
from gateway.database.failures import StoreFailed
from gateway.features.histories.tables import TABLES
from tests.support.databases import answered


async def test_only_one_operation_waits_for_a_locked_file(tmp_path: Path) -> None:
    tried, path = list[str](), tmp_path / "a.sqlite"
    database = Database(f"sqlite:///{path}", TABLES)
    await database.open()

    def locked(_connection: Connection) -> None:
        tried.append("locked")  # SQLite has waited for some seconds before it says so
        raise OperationalError("BEGIN", None, sqlite3.OperationalError("database is locked"))

    def works(_connection: Connection) -> str:
        tried.append("works")
        return "done"

    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(StoreFailed, match="locked"):
                await database.read(locked)
            tried.clear()
            for _ in range(3):
                with pytest.raises(StoreFailed, match="locked"):
                    await database.write(works)
                with pytest.raises(StoreFailed, match="locked"):
                    await database.read(works)
            assert tried == []
            other.execute("COMMIT")
        await answered(lambda: database.write(works))
        assert await database.read(works) == "done"
    finally:
        await database.close()


async def test_a_database_that_answers_with_another_error_is_not_left_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES)
    await database.open()

    def fails(_connection: Connection) -> None:
        raise OperationalError("BEGIN", None, sqlite3.OperationalError("disk I/O error"))

    try:
        with pytest.raises(StoreFailed, match="disk"):
            await database.write(fails)
        assert await database.write(lambda _connection: "done") == "done"
    finally:
        await database.close()
