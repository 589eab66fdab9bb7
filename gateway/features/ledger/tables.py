"""The tables of the ledger: one row for each request, and its sums by day. One schema for SQLite and Postgres.

A time is in milliseconds (Unix), a day is UTC's (YYYY-MM-DD). Money is in picodollars (10^-12 USD), which a row has as they
are. A sum of many could leave the integers of SQLite, so each sum of money is two columns: `..._mills`, whole 10^-3 USD, and
`..._pico`, what is left beyond them, added up. The amount is MILL * mills + pico, however it is divided between them, and
neither column overflows before 9 * 10^9 requests of a million dollars in one group.

A day's sums of a group are those of its rows, as long as the rows are kept.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table

from gateway.database.tables import Tables
from gateway.features.ledger.migrations import MIGRATIONS
from gateway.features.ledger.sums import COUNTS, GROUP, MONEY, TOKENS

VERSION: Final = 2
schema: Final = MetaData()
versions: Final = Table("warmroute_ledger_schema", schema, Column("version", Integer, primary_key=True, autoincrement=False))


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, String, nullable=False) for name in names]


def _integers(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False) for name in names]


# id: the ledger's own (`batches.py`). at_ms: the end of the request. request: its id, which its client may have chosen.
# model: its bounded name; model_name: what the client has asked for, an alias resolved. failed, stream, cancelled: 0 or 1.
# attempts: that failed before. ttft_ms: -1: no byte came. estimated: see `gateway/accounting/consumed.py`. metered: it has
# consumed something; priced: there is a price for its model. predicted, available: cached tokens, by the router. hours: of
# `written`, what is to stay for an hour.
rows: Final = Table(
    "warmroute_usage",
    schema,
    Column("id", String, primary_key=True),
    *_integers("at_ms"),
    *_texts("request", "tenant", "key", "model", "model_name", "alias", "pool", "replica", "endpoint"),
    *_integers("status", "failed", "stream", "cancelled", "resumed", "attempts"),
    *_texts("error"),
    *_integers("duration_ms", "ttft_ms", "predicted", "available", "metered", "priced"),
    *_texts("estimated"),
    *_integers(*TOKENS, *MONEY),
    Index("warmroute_usage_by_time", "at_ms"),
    sqlite_with_rowid=False,
)

daily: Final = Table(
    "warmroute_usage_daily",
    schema,
    *(Column(name, String, primary_key=True) for name in GROUP),
    *_integers(*COUNTS, *(f"{name}_{part}" for name in MONEY for part in ("mills", "pico"))),
    sqlite_with_rowid=False,
)

TABLES: Final = Tables("ledger.url", "ledger", schema, versions, VERSION, MIGRATIONS)
