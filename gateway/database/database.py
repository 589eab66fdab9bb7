"""A database by URL: SQLite or Postgres. Reads run at once; queued writes of many callers share one transaction.

    write ──┐
    write ──┼──► queue ──► the writer: one transaction for the queued writes ──► durable ──► each caller continues
    write ──┘

If a shared transaction fails, each write is repeated in a transaction of its own: no caller fails because of another one's
write. A write that conflicts with another gateway's transaction (a deadlock, say) is repeated a few times. All errors of the
database are raised as StoreFailed.

A slow database does as much as it can: a transaction gets fewer writes if it takes more than a part of the time limit
(`BatchSize`), and a write whose transaction has begun waits for it, or else a database that is a little too slow would do
everything too late.

Every operation has a time limit. After an operation that exceeded it, or found SQLite's file locked by another process, all
operations fail at once, for its reason, while a task in the background tries the database until it answers: requests do not
wait for a database that does not answer.

The driver (`driver.py`) executes reads and transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from gateway.database.driver import CONNECTIONS, TRIES, Driver, Work, is_conflict
from gateway.database.failures import LOCKED, StoreFailed, failed, reason_of
from gateway.database.tables import Tables
from gateway.database.urls import made, parsed, shown

OPERATION_S: Final = 10.0
MIGRATION_S: Final = 3600.0  # of all rows, when it is opened
RETRY_S: Final = 0.5  # between two attempts at a database that does not answer
MAX_BATCH: Final = 100  # writes in one transaction
FIRST_BATCH: Final = 8
LONG: Final = 4  # a transaction is long if it takes more than 1 / LONG of the time limit
MAX_WAITING: Final = 10_000  # writes

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class QueuedWrite:
    """done: with the result, or cancelled: its caller does not wait any more. begun: a transaction with it has begun."""

    work: Work[Any]
    done: asyncio.Future[Any]
    begun: bool = False


class BatchSize:
    """The writes of the next transaction, at most: twice as many after a full and short transaction, half after a long one."""

    def __init__(self, long_s: float) -> None:
        self.most = FIRST_BATCH
        self._long_s = long_s

    def after(self, writes: int, seconds: float, *, failed: bool = False) -> None:
        """A transaction took so long."""
        if seconds > self._long_s:
            self.most = max(1, min(self.most, writes) // 2)
        elif writes >= self.most and not failed:
            self.most = min(MAX_BATCH, 2 * self.most)


class Database:
    """A database (see the module). url: in SQLAlchemy's form, without a driver. operation_s: time limit of an operation. lost:
    called once if SQLite's file was deleted or replaced. read_only: no table is created or changed, and tables of another
    version are refused.
    """

    def __init__(
        self,
        url: str,
        tables: Tables,
        operation_s: float = OPERATION_S,
        lost: Callable[[], None] = lambda: None,
        *,
        read_only: bool = False,
    ) -> None:
        """Raises StoreFailed if the URL cannot be used. Does not connect yet."""
        self._url = parsed(url, tables.key)
        self._tables = tables
        self._read_only = read_only
        self._operation_s = operation_s
        self._stall = ""  # the reason why the database is left alone
        self._recovery: asyncio.Task[None] | None = None
        self._lost = lost
        self._driver: Driver | None = None
        self._queue = asyncio.Queue[QueuedWrite](MAX_WAITING)
        self._batch = BatchSize(operation_s / LONG)
        self._writer: asyncio.Task[None] | None = None
        self._readers = asyncio.Semaphore(CONNECTIONS - 1)  # the writer has the last one

    async def open(self) -> None:
        """Connect, and create missing tables; several processes may do so at once. A migration has MIGRATION_S, also one of
        another process, which is waited for. Raises StoreFailed.
        """
        try:
            async with self._bounded(MIGRATION_S):
                self._driver = made(self._url, self._tables, self._operation_s, self._lost, read_only=self._read_only)
                await self._driver.open()
        except (TypeError, ValueError) as error:  # raised by the driver for a part of the URL
            await self.close()
            raise StoreFailed(f"{self._tables.key}: {reason_of(error)}") from error
        except BaseException:
            await self.close()
            raise
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Execute the queued writes and disconnect. Later operations raise StoreFailed. Idempotent."""
        if self._recovery:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        if self._writer:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._operation_s):
                    await self._queue.join()
            writer, self._writer = self._writer, None
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        if self._driver:
            driver, self._driver = self._driver, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._operation_s):
                    await driver.close()

    async def read(self, work: Work[T]) -> T:
        """Execute a read. Raises StoreFailed, and the errors of `work`."""
        async with self._place(), self._bounded():
            return await self._opened().read(work)

    async def write(self, work: Work[T]) -> T:
        """Execute a write; it is durable when this returns. `work` may be executed twice, and must be idempotent.

        Waits for its transaction as long as an operation may take, and then for the end of the transaction as long. Raises
        StoreFailed, which is `in_doubt` if a transaction had begun, and the errors of `work`.
        """
        if self._writer is None:
            raise _closed()
        self._require_answers()
        queued = QueuedWrite(work, asyncio.get_running_loop().create_future())
        done: asyncio.Future[T] = queued.done
        try:
            self._queue.put_nowait(queued)
        except asyncio.QueueFull:
            raise StoreFailed(f"more than {MAX_WAITING:,} writes wait for the database") from None
        try:
            await asyncio.wait([done], timeout=self._operation_s)
            if queued.begun:
                await asyncio.wait([done], timeout=self._operation_s)
            if not done.done():
                raise self._silent()
            return done.result()
        except StoreFailed as failure:
            failure.in_doubt = queued.begun
            raise
        finally:
            done.cancel()

    async def _write(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._batch.most and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            waiting = [each for each in batch if not each.done.done()]  # callers of the others have timed out
            try:
                if len(waiting) < 2 or await self._done(waiting):
                    for each in waiting:
                        await self._alone(each)
            finally:
                for _ in batch:
                    self._queue.task_done()

    async def _alone(self, write: QueuedWrite) -> None:
        """Execute one write in a transaction of its own. Its caller gets the error."""
        done = write.done
        for left in reversed(range(TRIES)):
            if done.done() or (error := await self._done([write])) is None:
                return
            if not (left and error.__cause__ and is_conflict(error.__cause__)):
                if not done.done():
                    done.set_exception(error)
                return

    async def _done(self, batch: list[QueuedWrite]) -> Exception | None:
        """Execute the writes in one transaction. Returns the error, if any."""
        begun = time.monotonic()
        try:
            async with self._bounded():
                for each in batch:
                    each.begun = True
                results = await self._opened().write([each.work for each in batch])
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            self._batch.after(len(batch), time.monotonic() - begun, failed=True)
            return error
        self._batch.after(len(batch), time.monotonic() - begun)
        for each, result in zip(batch, results, strict=True):
            if not each.done.done():
                each.done.set_result(result)
        return None

    def _opened(self) -> Driver:
        """Raises StoreFailed."""
        if self._driver is None:
            raise _closed()
        return self._driver

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of the places for reads. Waiting for a place does not count as a stall. Raises StoreFailed."""
        try:
            async with asyncio.timeout(self._operation_s):
                await self._readers.acquire()
        except TimeoutError:
            raise StoreFailed(f"other reads have kept the database busy for {self._operation_s:g} s") from None
        try:
            yield
        finally:
            self._readers.release()

    @contextlib.asynccontextmanager
    async def _bounded(self, limit_s: float = 0.0) -> AsyncIterator[None]:
        """Limit the time of an operation. limit_s: 0: that of all operations. Raises StoreFailed for all errors of the
        database, at once while it is stalled.
        """
        self._require_answers()
        try:
            async with asyncio.timeout(limit_s or self._operation_s):
                yield
        except TimeoutError:
            raise self._stalled(self._silent()) from None
        except (SQLAlchemyError, OSError) as error:
            failure = failed(shown(self._url), error)
            raise (self._stalled(failure) if LOCKED in str(error) else failure) from error

    def _require_answers(self) -> None:
        """Raises StoreFailed if the database has not answered since an operation failed."""
        if self._stall:
            raise StoreFailed(self._stall)

    def _stalled(self, failure: StoreFailed) -> StoreFailed:
        """Leave an open database alone until it answers. Returns `failure`."""
        if self._writer is not None and not self._read_only:
            self._stall = str(failure)
            if self._recovery is None or self._recovery.done():
                self._recovery = asyncio.create_task(self._recover())
        return failure

    async def _recover(self) -> None:
        """Try the database until it answers, if only with an error, which then is for its operations."""
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                async with asyncio.timeout(self._operation_s):
                    await self._opened().write([_nothing])
            except TimeoutError:
                continue
            except (SQLAlchemyError, OSError, StoreFailed) as error:
                if LOCKED in str(error):
                    continue
            break
        self._stall = ""

    def _silent(self) -> StoreFailed:
        return StoreFailed(f"the database {shown(self._url)} has not answered within {self._operation_s:g} s")


def _nothing(_connection: Connection) -> None:
    """A write that only waits for the lock."""


def _closed() -> StoreFailed:
    return StoreFailed("the database is closed")
