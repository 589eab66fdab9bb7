"""Stores on a database of their own, SQLite's and Postgres's, with a clock that tests set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, delete
from sqlalchemy.util import await_only

from gateway.database.database import Database
from gateway.features.histories.records import StoredResponse
from gateway.features.histories.tables import TABLES, schema, versions
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.support.postgres import Postgres, postgres

TTL_S = 1000.0


class Clock:
    """Unix seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """One for all tests that leave it as it is."""
    with postgres() as started:
        yield started


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.tools)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new database."""
    if request.param == "sqlite":
        return file_url(tmp_path / "a.sqlite")
    started: Postgres = request.getfixturevalue("server")
    return started.new()


def file_url(path: Path) -> str:
    return f"sqlite:///{path}"


@contextlib.asynccontextmanager
async def opened(url: str, clock: Clock | None = None, *, empty: bool = False) -> AsyncIterator[RunStore]:
    """empty: whatever is there is removed first."""
    database = Database(url, TABLES)
    await database.open()
    store = RunStore(database, TTL_S, clock or Clock(), ResponseRuns())
    try:
        if empty:
            await database.write(_emptied)
        yield store
    finally:
        await store.close()


def _emptied(connection: Connection) -> None:
    for table in schema.sorted_tables:
        if table is not versions:
            connection.execute(delete(table))


def pausing(connection: Connection, waits: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop) -> None:
    """Work that waits for something in the event loop: from a thread (SQLite), or in the loop itself (Postgres)."""
    if connection.dialect.is_async:
        await_only(waits)
    else:
        asyncio.run_coroutine_threadsafe(waits, loop).result()


def response(id_: str, parent: str = "", owner: str = "o", *, size: int = 5, conversation: str = "") -> StoredResponse:
    """Its content says whose it is."""
    name = f"{owner}/{id_}".encode()
    return StoredResponse(
        owner=owner,
        id=id_,
        parent=parent,
        conversation=conversation,
        created_at=5.0,
        status="completed",
        input=b'"' + b"i" * size + name + b'"',
        output=b'"o' + name + b'"',
        response=b'{"id":"' + name + b'"}',
    )
