"""Records of requests, and ledgers on databases of their own, SQLite's and Postgres's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

from sqlalchemy import Connection, select

from gateway.accounting.consumed import Consumption
from gateway.accounting.meter import Bill
from gateway.database.database import Database
from gateway.dialects.usage import Usage
from gateway.features.ledger.batches import RowMaker
from gateway.features.ledger.buffer import Entry
from gateway.features.ledger.entries import LedgerEntries
from gateway.features.ledger.ledger import BUFFER_BYTES, Ledger, Opener, open_store
from gateway.features.ledger.metrics import LedgerMetrics
from gateway.features.ledger.section import LedgerConfig
from gateway.features.ledger.store import OPERATION_S, LedgerStore
from gateway.features.ledger.tables import TABLES, daily, rows
from gateway.features.table import new_metrics
from gateway.request.record import SettledRequest
from tests.gateway.features.histories.conftest import Clock, file_url, server, url

__all__ = ["Clock", "file_url", "server", "url"]  # the fixtures, too

NOON = 1_764_244_800.0  # 2025-11-27 12:00 UTC
DAY_S = 86_400.0


def record(**values: Any) -> SettledRequest:
    """Of a good chat request, but for `values`."""
    made = SettledRequest("r-1", "/v1/chat/completions", 10.0)
    settled: dict[str, Any] = {
        "label": "m",
        "model": "m",
        "pool": "p",
        "replica": "one:1",
        "tenant": "t",
        "status": 200,
        "answered": 200,
        "first_token": 10.25,
        "ended": 11.5,
        "predicted_cached_tokens": 700,
        "available_cached_tokens": 750,
        "consumed": Consumption(Usage(1000, 100, 800, 50, 10), 2),
        "bill": Bill(150, 80, 300, 720, 50, 7),
    }
    for name, value in (settled | values).items():
        groups = (made.sender, made.subject, made.placement, made.answer, made.spent)
        object.__setattr__(next((group for group in groups if hasattr(group, name)), made), name, value)
    return made


class Entries:
    """What the observer makes of records, in the order in which they ended."""

    def __init__(self, now: float = NOON, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.clock = Clock()
        self.clock.now = now
        self.ledger = ledger_of("sqlite:///never", self.clock, buffer_bytes=buffer_bytes)
        self.observe = LedgerEntries(self.ledger)

    def of(self, *records: SettledRequest) -> list[Entry]:
        for each in records:
            self.observe(each)
        taken = self.ledger.buffer.take(len(records))
        self.ledger.buffer.release(taken)
        return taken


def ledger_of(
    url: str,
    clock: Clock,
    opens: Opener = open_store,
    metrics: LedgerMetrics | None = None,
    *,
    retention_d: int = 30,
    **more: Any,
) -> Ledger:
    """clock: both of them. more: of the ledger."""
    return Ledger(LedgerConfig(url, retention_d), metrics or new_metrics().of(LedgerMetrics), clock, clock, opens, **more)


@contextlib.asynccontextmanager
async def stored(url: str, operation_s: float = OPERATION_S) -> AsyncIterator[tuple[LedgerStore, Database]]:
    database = Database(url, TABLES, operation_s)
    await database.open()
    try:
        yield LedgerStore(database), database
    finally:
        await database.close()


def maker(seed: int = 1) -> RowMaker:
    return RowMaker(random.Random(seed))


def all_rows(connection: Connection) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(select(rows).order_by(rows.c.id)).mappings()]


def all_sums(connection: Connection) -> list[dict[str, Any]]:
    groups = [daily.c[name] for name in ("day", "tenant", "key", "model", "pool", "endpoint")]
    return [dict(row) for row in connection.execute(select(daily).order_by(*groups)).mappings()]
