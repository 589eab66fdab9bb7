"""Driver of Postgres: the work runs in the event loop (see driver.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.database.creation import check_version, make_tables
from gateway.database.driver import CONNECTIONS, TRIES, Work, is_conflict
from gateway.database.tables import Tables

T = TypeVar("T")


class PostgresDriver:
    """A Driver. wait_s: limit of the wait for a connection while all are in use."""

    def __init__(self, url: URL, tables: Tables, wait_s: float, *, read_only: bool) -> None:
        self._url = url
        self._tables = tables
        self._wait_s = wait_s
        self._read_only = read_only
        self._engine: AsyncEngine | None = None

    async def open(self) -> None:
        self._engine = create_async_engine(
            self._url, pool_size=CONNECTIONS, max_overflow=0, pool_pre_ping=True, pool_timeout=self._wait_s
        )
        async with asyncio.timeout(self._wait_s):
            await self.read(lambda _connection: None)  # a migration may take longer than a connection
        if self._read_only:
            await self.read(lambda connection: check_version(connection, self._tables))
        else:
            await self._make_tables()

    async def _make_tables(self) -> None:
        """A migration may end in a deadlock with a gateway that writes to several of its tables."""
        for left in reversed(range(TRIES)):
            try:
                await self.write([lambda connection: make_tables(connection, self._tables)])
            except DBAPIError as error:
                if not left or not is_conflict(error):
                    raise
            else:
                return

    async def read(self, work: Work[T]) -> T:
        assert self._engine
        async with self._engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            return await connection.run_sync(work)

    async def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        assert self._engine

        def all_of_it(connection: Connection) -> list[Any]:
            return [work(connection) for work in works]

        async with self._engine.begin() as connection:
            return await connection.run_sync(all_of_it)

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine:
            await engine.dispose()
