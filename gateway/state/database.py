"""A database by URL: SQLite or Postgres. Reads go as they come; writes are gathered, many callers to one transaction.

    write ──┐
    write ──┼──► queue ──► the writer: one transaction for all that wait ──► durable ──► each caller goes on
    write ──┘

A transaction that fails is tried again with one write each, so that nobody fails for another one's write. Every operation is
bounded in time, and all errors of the database are StoreFailed.

SQLite is in WAL mode with synchronous=FULL: what was acknowledged survives a crash, of the machine as well. Several processes
may share the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import URL, event, insert, make_url, select, update
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway.state.records import StoreFailed
from gateway.state.tables import UPGRADED, VERSION, schema, versions

OPERATION_S: Final = 10.0
MAX_BATCH: Final = 100  # writes in one transaction
MAX_WAITING: Final = 10_000  # writes
_BUSY_MS: Final = 5000
_CONNECTIONS: Final = 4
_DRIVERS: Final = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]


class Database:
    """See the top of this file. url: as SQLAlchemy writes them, without a driver."""

    def __init__(self, url: str) -> None:
        """Raises StoreFailed if the URL cannot be used. Connects to nothing yet."""
        self._url = _parsed(url)
        self._engine: AsyncEngine | None = None
        self._queue = asyncio.Queue[tuple[Work[Any], asyncio.Future[Any]]](MAX_WAITING)
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and make what is missing of the schema; several processes may do so at once. Raises StoreFailed."""
        try:
            async with _bounded():
                self._engine = _engine(self._url)
                await _made(self._engine)
        except BaseException:
            await self.close()
            raise
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """What waits is written. Idempotent."""
        if self._writer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OPERATION_S):
                    await self._queue.join()
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
            self._writer = None
        if self._engine:
            await self._engine.dispose()
            self._engine = None

    async def read(self, work: Work[T]) -> T:
        """Raises StoreFailed, and what `work` raises."""
        assert self._engine
        async with _bounded(), self._engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            return await work(connection)

    async def write(self, work: Work[T]) -> T:
        """Returns when the write is durable. Its work may be done twice, and must see to it that this does no harm.

        Raises StoreFailed, and what `work` raises.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((work, done))
        except asyncio.QueueFull:
            raise StoreFailed(f"more than {MAX_WAITING:,} writes wait for the database") from None
        async with _bounded():
            return await done

    async def _write(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            waiting = [each for each in batch if not each[1].done()]  # the others have given up
            try:
                if len(waiting) == 1 or not await self._done(waiting):
                    for each in waiting:
                        await self._done([each], last=True)
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def _done(self, batch: list[tuple[Work[Any], asyncio.Future[Any]]], *, last: bool = False) -> bool:
        """Whether the batch was written. last: its errors go to its callers."""
        assert self._engine
        try:
            async with _bounded(), self._engine.begin() as connection:
                results = [await work(connection) for work, _ in batch]
        except Exception as error:  # noqa: BLE001  (it is the caller's)
            if last:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
            return False
        for (_, done), result in zip(batch, results, strict=True):
            if not done.done():
                done.set_result(result)
        return True


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreFailed("state.url is no database URL") from None
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise StoreFailed(
            f"state.url: {parsed.drivername!r} is not supported: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        )
    if parsed.drivername != "sqlite" and importlib.util.find_spec("asyncpg") is None:
        raise StoreFailed("Postgres needs asyncpg: pip install 'warmroute[postgres]'")
    return parsed.set(drivername=driver)


def _engine(url: URL) -> AsyncEngine:
    if not url.drivername.startswith("sqlite"):
        return create_async_engine(url, pool_size=_CONNECTIONS, max_overflow=0, pool_pre_ping=True, pool_timeout=OPERATION_S)
    if url.database:
        _private(Path(url.database))
    engine = create_async_engine(url, pool_size=_CONNECTIONS, max_overflow=0, pool_timeout=OPERATION_S)
    event.listen(engine.sync_engine, "connect", _tune)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


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
    connection.exec_driver_sql("BEGIN IMMEDIATE")  # else two that read before they write cannot both go on


async def _made(engine: AsyncEngine) -> None:
    for left in reversed(range(3)):
        try:
            async with engine.begin() as connection:
                await _make(connection)
            return
        except SQLAlchemyError:  # another process makes the same now
            if not left:
                raise
            await asyncio.sleep(0.1)


async def _make(connection: AsyncConnection) -> None:
    for table in schema.sorted_tables:
        await connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            await connection.execute(CreateIndex(index, if_not_exists=True))
    found = (await connection.execute(select(versions.c.version))).scalars().all()
    if not found:
        await connection.execute(insert(versions).values(version=VERSION))
    elif list(found) == [UPGRADED]:
        await connection.execute(update(versions).values(version=VERSION))
    elif list(found) != [VERSION]:
        raise StoreFailed(f"the database has version {found[0]} of the tables, and this gateway needs {VERSION}")


@contextlib.asynccontextmanager
async def _bounded() -> AsyncIterator[None]:
    """Raises StoreFailed for all errors of the database."""
    try:
        async with asyncio.timeout(OPERATION_S):
            yield
    except TimeoutError:
        raise StoreFailed(f"the database has not answered within {OPERATION_S:g} s") from None
    except (SQLAlchemyError, OSError) as error:
        raise StoreFailed(_text(error)) from error


def _text(error: Exception) -> str:
    """In one line: SQLAlchemy adds the statement and its values, which are prompts."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
