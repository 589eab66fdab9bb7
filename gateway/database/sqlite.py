"""SQLite: a thread that writes, some that read, and a file that may be taken away meanwhile.

    write, read ──► a thread ──► enter: is it still the file that has the name? ──► statements ──► leave
                                   └── no: wait for those in it, close it, make or open the one of that name

A write is acknowledged only if the file still has its name after the commit; else it is done again, in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import URL

from gateway.database.driver import CONNECTIONS, Work
from gateway.database.jobs import Job, run
from gateway.database.sqlite_file import SqliteFile, handle_of
from gateway.database.tables import Tables

log = logging.getLogger("warmroute.database")

_TRIES: Final = 3  # of a write whose file is taken away

T = TypeVar("T")


class FileLostError(OSError):
    """What was written is in a file that nobody finds."""


class SqliteDriver:
    """A Driver. url: with a path. lost: called when the file was deleted or replaced."""

    def __init__(self, url: URL, tables: Tables, lost: Callable[[], None], *, read_only: bool) -> None:
        self._url = url
        self._tables = tables
        self._read_only = read_only
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = ThreadPoolExecutor(1, f"{tables.content}-write")
        self._reading = ThreadPoolExecutor(CONNECTIONS - 1, f"{tables.content}-read")
        self._changed = threading.Condition()  # guards what follows
        self._file: SqliteFile | None = None
        self._users = 0  # threads in the file

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await run(self._writing, self._open)

    async def read(self, work: Work[T]) -> T:
        def reads(job: Job) -> T:
            with self._entered() as file, file.reading() as connection, _held(job, handle_of(connection)):
                return work(connection)

        return await run(self._reading, reads)

    async def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        def writes(job: Job) -> list[Any]:
            for _ in range(_TRIES):
                with self._entered() as file:
                    with file.transaction() as connection, _held(job, handle_of(connection)):
                        results = [work(connection) for work in works]
                        job.check()
                    if not file.is_lost():
                        return results
            raise FileLostError("the database's file is deleted or replaced again and again")

        return await run(self._writing, writes)

    async def close(self) -> None:
        self._loop = None
        try:
            await run(self._writing, self._close)
        finally:
            for pool in (self._writing, self._reading):
                pool.shutdown(wait=False)

    def _open(self, _job: Job) -> None:
        with self._changed:
            self._file = self._opened()

    def _opened(self) -> SqliteFile:
        return SqliteFile(self._url, self._tables, read_only=self._read_only)

    def _close(self, _job: Job) -> None:
        """When nobody is in it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            file, self._file = self._file, None
            if file:
                file.close()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[SqliteFile]:
        """The file that has the name."""
        with self._changed:
            file = self._current()
            self._users += 1
        try:
            yield file
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _current(self) -> SqliteFile:
        """With the condition held. While one thread waits for the others to leave a lost file, nobody enters it."""
        while (file := self._file) is None or file.is_lost():
            self._changed.wait_for(partial(self._is_left, file))
            if self._file is not file:
                continue  # another thread was first
            if file:
                self._file = None
                if loop := self._loop:
                    loop.call_soon_threadsafe(self._say_lost)
                file.abandon()
            if self._loop is None:
                raise FileLostError("the database is closed")
            self._file = self._opened()
        return file

    def _is_left(self, file: SqliteFile | None) -> bool:
        return not self._users or self._file is not file

    def _say_lost(self) -> None:
        """In the event loop: neither logs nor metrics are made for threads."""
        log.error(
            f"the file of {self._tables.content} was deleted or replaced under the gateway:"
            " the file of that name is used from now on",
            extra={"path": self._url.database},
        )
        self._lost()


@contextlib.contextmanager
def _held(job: Job, handle: Any) -> Iterator[None]:
    job.begin(handle)
    try:
        yield
    finally:
        job.end()
