"""A database that another process holds is left alone for a while: only one operation waits for it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from gateway.database.database import STALL_S, Database
from gateway.database.failures import StoreFailed
from gateway.features.histories.tables import TABLES


async def test_only_one_operation_waits_for_a_locked_file(tmp_path: Path) -> None:
    now, tried = [0.0], list[str]()
    database = Database(f"sqlite:///{tmp_path}/a.sqlite", TABLES, clock=lambda: now[0])
    await database.open()

    def locked(_connection: Connection) -> None:
        tried.append("locked")  # SQLite has waited for some seconds before it says so
        raise OperationalError("BEGIN", None, sqlite3.OperationalError("database is locked"))

    def works(_connection: Connection) -> str:
        tried.append("works")
        return "done"

    try:
        with pytest.raises(StoreFailed, match="locked"):
            await database.write(locked)
        tried.clear()
        for _ in range(3):
            with pytest.raises(StoreFailed):
                await database.write(works)
            with pytest.raises(StoreFailed):
                await database.read(works)
        assert tried == []
        now[0] += STALL_S + 1
        assert await database.write(works) == "done"
        assert await database.read(works) == "done"
    finally:
        await database.close()
