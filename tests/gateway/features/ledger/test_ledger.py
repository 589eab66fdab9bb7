"""The ledger beside the requests: a database that fails, comes back, refuses a row, never answers; the end; the purge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from pathlib import Path

import pytest

from gateway.database.database import Database
from gateway.database.failures import StoreFailed
from gateway.database.steadiness import STEADY_S
from gateway.features.ledger.batches import LedgerBatch
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import MAX_BATCH, BatchStore, Ledger, Opener
from gateway.features.ledger.metrics import LedgerMetrics
from gateway.features.ledger.section import LedgerConfig
from gateway.features.ledger.store import InvalidValueError, LedgerStore
from gateway.features.ledger.tables import TABLES
from gateway.features.table import new_metrics
from tests.gateway.conftest import eventually
from tests.gateway.features.ledger.conftest import DAY_S, NOON, Clock, all_rows, file_url, ledger_of, record, stored


class FakeStore:
    """Takes what `fails` lets it take. ids: of all rows that it has."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.hangs = False
        self.bad = ""
        self.batches = list[int]()
        self.ids = list[str]()
        self.purged = list[tuple[int, str]]()
        self.purge_fails: Exception | None = None
        self.opened = 0
        self.closed = False
        self.cannot_open = False
        self.writing = asyncio.Event()

    async def open(self, url: str) -> BatchStore:
        if self.cannot_open:
            raise StoreFailed("it cannot be opened")
        self.opened += 1
        return self

    async def write(self, batch: LedgerBatch) -> None:
        self.writing.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise self.fails
        if self.bad and any(row[2] == self.bad for row in batch.rows()):
            raise InvalidValueError("a bad row")
        self.batches.append(len(batch.entries))
        self.ids += [row[0] for row in batch.rows()]

    async def purge(self, rows_before_ms: int, days_before: str) -> int:
        self.purged.append((rows_before_ms, days_before))
        if self.purge_fails:
            raise self.purge_fails
        return 0

    async def close(self) -> None:
        self.closed = True


class Kit:
    """A ledger over a FakeStore."""

    def __init__(self, **config: int) -> None:
        self.store = FakeStore()
        self.clock = Clock()
        self.clock.now = NOON
        opens: Opener = self.store.open
        self.metrics = new_metrics().of(LedgerMetrics)
        self.ledger: Ledger = ledger_of("sqlite", self.clock, opens, metrics=self.metrics, **config)
        self._observe = LedgerEntries(self.ledger)

    def end(self, count: int, **values: object) -> None:
        for _ in range(count):
            self._observe(record(**values))

    def counted(self) -> tuple[float, float, float, float]:
        """written, buffered, dropped, failures."""
        metrics = self.metrics
        counters = (metrics.written, metrics.dropped, metrics.failures)
        written, dropped, failures = (each.values[()] for each in counters)
        return written, metrics.buffered.values[()], dropped, failures


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "warmroute.ledger"]


async def test_what_is_buffered_is_written_in_batches_in_order() -> None:
    kit = Kit()
    kit.end(2 * MAX_BATCH + 3)
    assert await kit.ledger.flush()
    assert kit.store.batches == [MAX_BATCH, MAX_BATCH, 3]
    assert kit.store.ids == sorted(set(kit.store.ids))
    assert await kit.ledger.flush()
    assert kit.counted() == (2 * MAX_BATCH + 3, 0, 0, 0)
    assert kit.store.opened == 1


async def test_a_database_that_fails_costs_two_lines_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    with caplog.at_level(logging.INFO, "warmroute.ledger"):
        kit.store.fails = StoreFailed("disk full")
        for _ in range(5):
            kit.end(10)
            assert not await kit.ledger.flush()
        assert kit.counted() == (0, 50, 0, 5)
        assert lines(caplog) == ["the ledger cannot be written: requests are served, and their usage waits in memory"]
        assert caplog.records[-1].__dict__["reason"] == "disk full"
        kit.store.fails = None
        kit.clock.now += 20
        assert await kit.ledger.flush()
    assert lines(caplog)[1:] == ["the ledger is written again"]
    assert (caplog.records[-1].__dict__["seconds"], caplog.records[-1].__dict__["lost"]) == (20, 0)
    assert len(set(kit.store.ids)) == 50
    assert kit.counted() == (50, 0, 0, 5)


async def test_a_gauge_is_down_while_the_database_does_not_take_what_is_written() -> None:
    kit, seen = Kit(), list[float]()
    for failure in (None, StoreFailed("gone"), None):
        kit.store.fails = failure
        kit.end(1)
        await kit.ledger.flush()
        seen.append(kit.metrics.up.values[()])
    assert seen == [1, 0, 1]


async def test_a_database_that_cannot_be_opened_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    kit.store.cannot_open = True
    kit.end(3)
    assert not await kit.ledger.flush()
    assert not await kit.ledger.flush()
    kit.store.cannot_open = False
    assert await kit.ledger.flush()
    assert kit.store.batches == [3]
    assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]


async def test_beyond_its_bound_the_newest_are_lost_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit(buffer_bytes=1 << 20)
    kit.store.fails = StoreFailed("gone")
    kit.end(10)
    assert not await kit.ledger.flush()
    kit.end(5000)
    for _ in range(3):
        assert not await kit.ledger.flush()
    _, buffered, dropped, _ = kit.counted()
    assert buffered + dropped == 5010
    assert dropped > 3000
    kit.store.fails = None
    assert await kit.ledger.flush()
    assert kit.counted()[:3] == (buffered, 0, dropped)
    assert lines(caplog)[1:] == [
        "the ledger's buffer is full: the usage of further requests is lost",
        "the ledger is written again",
    ]
    assert caplog.records[-1].levelname == "ERROR"
    assert caplog.records[-1].__dict__["lost"] == dropped
    kit.end(10)
    assert await kit.ledger.flush()
    assert kit.counted()[2] == dropped


async def test_a_row_that_is_refused_goes_alone(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    kit.store.bad = "poison"
    kit.end(70)
    kit.end(1, id="poison")
    kit.end(29)
    assert await kit.ledger.flush()
    assert len(set(kit.store.ids)) == 99
    assert kit.store.ids == sorted(kit.store.ids), "the first ones go first"
    assert kit.counted() == (99, 0, 1, 0)
    assert lines(caplog) == ["the ledger cannot take a request"]
    kit.ledger.buffer.check()


async def test_a_bug_in_the_store_does_not_end_the_ledger(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()

    async def broken(_url: str) -> BatchStore:
        raise ZeroDivisionError

    ledger = ledger_of("sqlite", kit.clock, broken)
    assert not await ledger.flush()
    assert "the ledger has failed" in lines(caplog)


async def test_a_write_that_is_given_up_is_written_by_the_end_and_once() -> None:
    kit = Kit()
    kit.store.hangs = True
    kit.end(5)
    running = asyncio.create_task(kit.ledger.run())
    await kit.store.writing.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    kit.store.hangs = False
    kit.end(2)
    await kit.ledger.close()
    assert kit.store.batches == [5, 2]
    assert kit.store.closed


async def test_a_gateway_that_begins_waits_for_the_database_to_be_open_but_not_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until it is open nothing is written: what comes by then would be lost with a kill."""
    for cannot_open in (False, True):
        kit = Kit()
        kit.store.cannot_open = cannot_open
        running = asyncio.create_task(kit.ledger.run())
        async with asyncio.timeout(40):
            await kit.ledger.wait_for_database(within_s=1000)
        assert (kit.store.opened, kit.metrics.up.values[()]) == ((0, 0) if cannot_open else (1, 1))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(40):
        await Kit().ledger.wait_for_database(within_s=0.01)


async def test_the_end_does_not_wait_for_a_database_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    kit.store.fails = StoreFailed("gone")
    kit.end(4)
    await kit.ledger.close()
    assert lines(caplog)[-1] == "usage is lost: it was not written to the ledger before the end"
    assert caplog.records[-1].__dict__["requests"] == 4
    assert kit.store.closed


async def test_what_is_old_goes_when_the_clock_has_been_steady() -> None:
    kit = Kit(retention_d=2, sums_d=10)
    monotonic = kit.clock
    assert await kit.ledger.flush()
    await kit.ledger.purge()
    assert not kit.store.purged
    monotonic.now += STEADY_S + 1
    await kit.ledger.purge()
    assert kit.store.purged == [(int((monotonic.now - 2 * DAY_S) * 1000), "2025-11-17")]
    kit.store.fails = StoreFailed("gone")
    kit.end(1)
    assert not await kit.ledger.flush()
    await kit.ledger.purge()
    assert len(kit.store.purged) == 1, "nothing is removed while nothing is written"


async def test_a_bug_in_a_purge_does_not_end_the_writing(caplog: pytest.LogCaptureFixture) -> None:
    kit = Kit()
    assert await kit.ledger.flush()
    await kit.ledger.purge()
    kit.clock.now += STEADY_S + 1
    kit.store.purge_fails = ValueError("a bug")
    running = asyncio.create_task(kit.ledger.run())
    await eventually(lambda: "old rows could not be removed from the ledger" in lines(caplog))
    kit.end(3)
    await eventually(lambda: len(kit.store.ids) == 3)
    running.cancel()
    await asyncio.wait([running])


async def test_a_clock_that_jumps_ahead_removes_nothing(tmp_path: Path) -> None:
    wall, monotonic = Clock(), Clock()
    wall.now = NOON
    ledger = Ledger(LedgerConfig(url=file_url(tmp_path / "a.sqlite")), new_metrics().of(LedgerMetrics), wall, monotonic)
    observe = LedgerEntries(ledger)
    observe(record())
    await ledger.flush()
    for jump in (0.0, 4000.0, 400 * DAY_S, 10.0, -400 * DAY_S, 4000.0):
        wall.now += jump
        monotonic.now += jump if 0 <= jump < DAY_S else 1
        observe(record())
        assert await ledger.flush()
        await ledger.purge()
    await ledger.close()
    async with stored(file_url(tmp_path / "a.sqlite")) as (_, database):
        assert len(await database.read(all_rows)) == 7


async def test_it_runs_by_itself(url: str) -> None:
    clock = Clock()
    clock.now = NOON
    metrics = new_metrics().of(LedgerMetrics)
    ledger = ledger_of(url, clock, metrics=metrics)
    observe = LedgerEntries(ledger)
    running = asyncio.create_task(ledger.run())
    for _ in range(500):
        observe(record())
    await eventually(lambda: metrics.written.values[()] >= 500)
    observe(record())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await ledger.close()
    async with stored(url) as (_, database):
        assert len(await database.read(all_rows)) == 501


async def test_a_file_that_is_locked_is_written_when_it_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "a.sqlite", Clock()

    async def opens(url: str) -> BatchStore:
        database = Database(url, TABLES)
        await database.open()
        return LedgerStore(database)

    ledger = ledger_of(file_url(path), clock, opens)
    observe = LedgerEntries(ledger)
    observe(record())
    assert await ledger.flush()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        observe(record())
        assert not await ledger.flush()
        other.execute("COMMIT")
    assert "locked" in caplog.records[0].__dict__["reason"]
    async with asyncio.timeout(40):
        while not await ledger.flush():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await ledger.close()
    async with stored(file_url(path)) as (_, database):
        assert len(await database.read(all_rows)) == 2


async def test_a_file_that_is_deleted_is_a_database_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.sqlite"
    ledger = ledger_of(file_url(path), Clock())
    observe = LedgerEntries(ledger)
    observe(record())
    assert await ledger.flush()
    path.unlink()
    for _ in range(2):
        observe(record())
        assert not await ledger.flush()
    assert ledger.buffer.entries == 2
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "the database of ledger",
        "the ledger cannot be written",
    ]
    await ledger.close()
