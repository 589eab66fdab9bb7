"""The ledger: every request's usage in a database, written in the background.

    end of a request ── add ──► buffer ──► a batch, every FLUSH_S ──► one transaction (store.py)
                       1 us      └── full: new entries are dropped      └── fails: the same batch again, every RETRY_S

No request waits for the ledger or fails with it. While the database does not accept a batch, the entries stay in the buffer.
The log has one line when that begins, and one when it ends, with the number of lost entries.

A killed process loses its unwritten entries, collected in FLUSH_S and one transaction. Batches are small because the event loop
has to wait while a thread makes the rows of one.

Loading SQLAlchemy takes half a second and 35 MB, under load more. A gateway with a ledger loads it in a thread before it serves
requests (`wait_for_database`), because nothing is written until the database is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from gateway.database.failures import StoreFailed
from gateway.database.places import LEDGER_FILE, with_path
from gateway.database.steadiness import Steadiness
from gateway.features.ledger.batches import LedgerBatch, RowMaker, day_of, milliseconds
from gateway.features.ledger.buffer import Buffer
from gateway.features.ledger.metrics import LedgerMetrics
from gateway.features.ledger.section import LedgerConfig

log = logging.getLogger("warmroute.ledger")

FLUSH_S: Final = 0.5
MIN_PAUSE_S: Final = 0.05  # between transactions, so that other processes can write
RETRY_S: Final = 1.0
MAX_BATCH: Final = 200  # rows
BEGIN_S: Final = 3.0  # wait for the database at the start
CLOSE_S: Final = 4.0  # time limit of the last writes
DISCONNECT_S: Final = 1.0
PURGE_S: Final = 60.0
BUFFER_BYTES: Final = 64 << 20  # about 60,000 requests, minutes without the database; more are dropped and counted
SUMS_D: Final = 400  # a year can be compared with the one before; a sum of a day is small
_PURGE_PAUSE_S: Final = 0.1  # between transactions, so that other processes can write
_DAY_S: Final = 86_400


class BatchStore(Protocol):
    """Interface of `LedgerStore`."""

    async def write(self, batch: LedgerBatch) -> None: ...
    async def purge(self, rows_before_ms: int, days_before: str) -> int: ...
    async def close(self) -> None: ...


Opener = Callable[[str], Awaitable[BatchStore]]


async def open_store(url: str) -> BatchStore:
    """Open the database. Raises StoreFailed."""
    await asyncio.to_thread(importlib.import_module, "gateway.features.ledger.store")
    from gateway.features.ledger.store import open_ledger_store

    return await open_ledger_store(url)


class Ledger:
    """The ledger of one process. wall_clock: Unix seconds. clock: monotonic seconds. opener: opens the database. sums_d: days
    for which daily sums are stored, at least as long as rows, because reports of whole days need them.
    """

    def __init__(
        self,
        config: LedgerConfig,
        metrics: LedgerMetrics,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        opener: Opener = open_store,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        sums_d: int = SUMS_D,
    ) -> None:
        self.buffer = Buffer(buffer_bytes)
        self._sums_d = max(sums_d, config.retention_d)
        self.wall_clock = wall_clock
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._open_store = opener
        self._maker = RowMaker()
        self._steadiness = Steadiness()
        self._store: BatchStore | None = None
        self._unwritten = deque[LedgerBatch]()  # unwritten batches, in order
        self._write_lock = asyncio.Lock()
        self._open_attempted = asyncio.Event()  # the first attempt to open the database is over
        self._failing_since: float | None = None
        self._dropped_before = 0  # dropped entries when the failure began
        self._refused = 0
        self._full = False  # the log has reported a full buffer

    async def run(self) -> None:
        """Write and purge until cancelled. The database is opened first, so that the log has its problems at the start."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write())
            group.create_task(self._purge())

    async def wait_for_database(self, within_s: float = BEGIN_S) -> None:
        """Wait until the first attempt to open the database is over, at most within_s seconds. Needs `run`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._open_attempted.wait()

    async def flush(self) -> bool:
        """Write all buffered entries. False: the database does not accept them, and they stay in the buffer."""
        async with self._write_lock:
            try:
                store = await self._opened()
                while batch := self._next_batch():
                    await self._written(store, batch)
                    self._report_recovery()
            except StoreFailed as failure:
                self._report_failure(str(failure))
                return False
            except Exception as error:  # a bug must not stop the ledger
                log.exception("the ledger has failed")
                self._report_failure(repr(error)[:300])
                return False
            else:
                self._report_recovery()
                return True
            finally:
                self._open_attempted.set()
                self._show()

    async def close(self) -> None:
        """Write the buffered entries within CLOSE_S, and disconnect. Call it after the last request, when `run` has ended."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            log.warning("the ledger's database does not answer at the end", extra={"within_s": CLOSE_S})
        if self.buffer.entries:
            log.error("usage is lost: it was not written to the ledger before the end", extra={"requests": self.buffer.entries})
        store, self._store = self._store, None
        if store:
            try:
                async with asyncio.timeout(DISCONNECT_S):
                    await store.close()
            except TimeoutError:
                log.warning("the ledger's database was not closed in time", extra={"within_s": DISCONNECT_S})

    # -- writing

    async def _write(self) -> None:
        while True:
            started = self._clock()
            written = await self.flush()
            took = self._clock() - started  # entries of a long transaction do not wait for another FLUSH_S
            await asyncio.sleep(max(MIN_PAUSE_S, FLUSH_S - took) if written else RETRY_S)

    async def _opened(self) -> BatchStore:
        if self._store is None:
            self._store = await self._open_store(with_path(self._config.url, LEDGER_FILE))
        return self._store

    def _next_batch(self) -> LedgerBatch | None:
        """The next batch to write; the same one until it is written."""
        if not self._unwritten and (entries := self.buffer.take(MAX_BATCH)):
            self._unwritten.append(self._maker.batch(entries, self.wall_clock()))
        return self._unwritten[0] if self._unwritten else None

    async def _written(self, store: BatchStore, batch: LedgerBatch) -> None:
        """Write a batch. If the database refuses a row, the batch is split in halves until that row is alone, and is dropped.

        Raises StoreFailed.
        """
        try:
            await store.write(batch)
        except StoreFailed:
            raise
        except Exception as error:  # a row is refused: the others must still be written
            halves = batch.halves()
            self._unwritten.popleft()
            self._unwritten.extendleft(reversed(halves))
            if not halves:
                log.exception("the ledger cannot take a request", extra={"reason": str(error)[:300]})
                self._refused += 1
                self.buffer.release(batch.entries)
            return
        self._unwritten.popleft()
        self.buffer.release(batch.entries)
        self._metrics.written.add((), len(batch.entries))

    # -- failing

    def _report_failure(self, reason: str) -> None:
        self._metrics.failures.add()
        about = {"reason": reason, "buffered": self.buffer.entries}
        if self._failing_since is None:
            self._failing_since, self._dropped_before, self._full = self._clock(), self.buffer.dropped, False
            log.error("the ledger cannot be written: requests are served, and their usage waits in memory", extra=about)
        if not self._full and self.buffer.dropped > self._dropped_before:
            self._full = True
            log.error("the ledger's buffer is full: the usage of further requests is lost", extra=about)

    def _report_recovery(self) -> None:
        if self._failing_since is None:
            return
        lost, seconds = self.buffer.dropped - self._dropped_before, self._clock() - self._failing_since
        self._failing_since = None
        about = {"seconds": round(seconds, 1), "buffered": self.buffer.entries, "lost": lost}
        log.log(logging.ERROR if lost else logging.WARNING, "the ledger is written again", extra=about)

    def _show(self) -> None:
        self._metrics.buffered.set((), self.buffer.entries)
        self._metrics.up.set((), self._failing_since is None)
        self._metrics.dropped.set((), float(self.buffer.dropped + self._refused))

    # -- purging

    async def _purge(self) -> None:
        while True:
            try:
                while await self.purge():  # noqa: ASYNC110  (no event to wait for: the pause keeps it slow)
                    await asyncio.sleep(_PURGE_PAUSE_S)
            except StoreFailed as failure:
                log.warning("old rows could not be removed from the ledger", extra={"reason": str(failure)})
            except Exception:  # a bug must not stop the writing
                log.exception("old rows could not be removed from the ledger")
            await asyncio.sleep(PURGE_S)

    async def purge(self) -> bool:
        """Remove some old rows. Returns whether there may be more. Raises StoreFailed."""
        now = self.wall_clock()
        if not self._steadiness.steady(now, self._clock()) or self._store is None or self._failing_since is not None:
            return False
        rows_before_ms = milliseconds(now - self._config.retention_d * _DAY_S)
        days_before = day_of(milliseconds(now - self._sums_d * _DAY_S))
        return bool(await self._store.purge(rows_before_ms, days_before))

    def __repr__(self) -> str:
        state = "written" if self._failing_since is None else "failing"
        return f"<Ledger, {state}, {self.buffer!r}>"
