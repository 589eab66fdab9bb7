"""SQLAlchemy's engine for a URL, and the tables behind it: what differs between SQLite and Postgres is in here.

Several gateways may open one database at the same moment. On Postgres the first one holds a lock while it makes the tables
(CREATE TABLE IF NOT EXISTS fails there when two do it at once), on SQLite a transaction that writes is such a lock. Nothing is
made where all is there, so a role without the right to create tables will do then.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, event, insert, inspect, make_url, select, text, update
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway.state.records import StoreFailed
from gateway.state.tables import UPGRADED, VERSION, schema, versions

_BUSY_MS: Final = 5000
CONNECTIONS: Final = 4
_SQLITE: Final = "sqlite"
_READS: Final = "warmroute_reads"
_DRIVERS: Final = {_SQLITE: "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_LOCK: Final = 0x7761726D726F7574  # of Postgres, by number: "warmrout"
_CONFLICTS: Final = frozenset(["40001", "40P01", "23505"])  # SQLSTATE: serialization, deadlock, the same key at once


def parsed(url: str) -> URL:
    """With its driver. Raises StoreFailed."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreFailed("state.url is no database URL") from None
    driver = _DRIVERS.get(found.drivername)
    if driver is None:
        raise StoreFailed(
            f"state.url: {found.drivername!r} is not supported: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        )
    if found.drivername == _SQLITE:
        return found.set(drivername=driver)
    if importlib.util.find_spec("asyncpg") is None:
        raise StoreFailed("Postgres needs asyncpg: pip install 'warmroute[postgres]'")
    if "sslmode" in found.query:  # as libpq calls it
        found = found.difference_update_query(["sslmode"]).update_query_dict({"ssl": found.query["sslmode"]})
    return found.set(drivername=driver)


def made(url: URL, wait_s: float) -> AsyncEngine:
    """url: from `parsed`. wait_s: for a connection while all are in use. Raises OSError; connects to nothing yet."""
    if not _is_file(url):
        return create_async_engine(url, pool_size=CONNECTIONS, max_overflow=0, pool_pre_ping=True, pool_timeout=wait_s)
    if url.database:
        _private(Path(url.database))
    engine = create_async_engine(url, pool_size=CONNECTIONS, max_overflow=0, pool_timeout=wait_s)
    event.listen(engine.sync_engine, "connect", _tune)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


async def make_tables(engine: AsyncEngine) -> None:
    """Those that are missing. Raises StoreFailed for tables of another version, and errors of the database."""
    async with engine.begin() as connection:
        if not await _complete(connection):
            if engine.dialect.name != _SQLITE:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})
            await _make(connection)
        found = (await connection.execute(select(versions.c.version))).scalars().all()
        if list(found) != [VERSION]:
            raise StoreFailed(f"the database has version {found[0]} of the tables, and this gateway needs {VERSION}")


def read_options(engine: AsyncEngine) -> dict[str, Any]:
    """Of a connection that reads: each statement for itself, without a transaction."""
    return {_READS: True} if engine.dialect.name == _SQLITE else {"isolation_level": "AUTOCOMMIT"}


def is_conflict(error: BaseException) -> bool:
    """Whether the same once more may go well: another transaction was in its way."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _CONFLICTS


def _is_file(url: URL) -> bool:
    return url.drivername.startswith(_SQLITE)


def _private(path: Path) -> None:
    """What it holds are prompts: nobody else reads them."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _tune(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Any) -> None:
    if not connection.get_execution_options().get(_READS):  # a read would wait for the writers of all gateways
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # else two that read before they write cannot both go on


async def _complete(connection: AsyncConnection) -> bool:
    def work(sync: Any) -> bool:
        return {table.name for table in schema.sorted_tables} <= set(inspect(sync).get_table_names())

    return await connection.run_sync(work) and bool((await connection.execute(select(versions.c.version))).first())


async def _make(connection: AsyncConnection) -> None:
    for table in schema.sorted_tables:
        await connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            await connection.execute(CreateIndex(index, if_not_exists=True))
    if not (await connection.execute(select(versions.c.version))).first():
        await connection.execute(insert(versions).values(version=VERSION))
    await connection.execute(update(versions).where(versions.c.version == UPGRADED).values(version=VERSION))
