"""SQLite driver: one thread writes, some read. A file that is deleted or replaced while open is not used until a restart.

write, read ──► a thread ──► statements ──► does the path still lead to the open file? ── yes ──► result
                                              └── no: FileLostError, now and for every later operation; logged once
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import URL

from gateway.database.driver import CONNECTIONS, Work
from gateway.database.sqlite_file import FileLostError, SqliteFile
from gateway.database.tables import Tables

log = logging.getLogger("warmroute.database")

T = TypeVar("T")


class SqliteDriver:
    """A Driver. url: with a path. lost: called once if the file was deleted or replaced."""

    def __init__(self, url: URL, tables: Tables, lost: Callable[[], None], *, read_only: bool) -> None:
        self._url = url
        self._tables = tables
        self._read_only = read_only
        self._lost = lost
        self._is_lost = False
        self._writing = ThreadPoolExecutor(1, f"{tables.content}-write")
        self._reading = ThreadPoolExecutor(CONNECTIONS - 1, f"{tables.content}-read")
        self._file: SqliteFile | None = None

    async def open(self) -> None:
        def opens() -> None:
            self._file = SqliteFile(self._url, self._tables, read_only=self._read_only)

        await asyncio.get_running_loop().run_in_executor(self._writing, opens)

    async def read(self, work: Work[T]) -> T:
        def reads(file: SqliteFile) -> T:
            with file.reading() as connection:
                return work(connection)

        return await self._run(self._reading, reads)

    async def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        def writes(file: SqliteFile) -> list[Any]:
            with file.transaction() as connection:
                return [work(connection) for work in works]

        return await self._run(self._writing, writes)

    async def close(self) -> None:
        """Close the file after the running operations."""

        def closes() -> None:
            self._reading.shutdown()
            if self._file:
                self._file.close()

        try:
            await asyncio.get_running_loop().run_in_executor(self._writing, closes)
        finally:
            self._writing.shutdown(wait=False)

    async def _run(self, pool: ThreadPoolExecutor, operation: Callable[[SqliteFile], T]) -> T:
        if self._is_lost:
            raise FileLostError
        file = self._file
        assert file

        def checked() -> T:
            file.check_place()
            try:
                return operation(file)
            finally:
                file.check_place()

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, checked)
        except FileLostError as failure:
            self._report(failure)
            raise

    def _report(self, failure: FileLostError) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.error(f"the database of {self._tables.content}: {failure}", extra={"path": self._url.database})
            self._lost()
