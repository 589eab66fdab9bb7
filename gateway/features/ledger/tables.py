"""The tables of the ledger: one row for each request, and sums by day. One schema for SQLite and Postgres.

Times are Unix milliseconds, days are UTC (YYYY-MM-DD). Money is in picodollars (10^-12 USD). A sum of many amounts could exceed
SQLite's integers, so each sum of money is two columns: `..._mills`, whole 10^-3 USD, and `..._pico`, the sum of the remainders.
The amount is MILL * mills + pico, however it is divided between them. Neither column overflows before 9 * 10^9 requests of a
million dollars in one group.

The sums of a group and day equal the sums of its rows, as long as the rows are stored.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, MetaData, Table

from gateway.database.columns import added_texts, integers, keys, texts, version_table
from gateway.database.tables import Tables
from gateway.features.ledger.migrations import MIGRATIONS
from gateway.features.ledger.sums import COUNTS, GROUP, MONEY, ROW_GROUP, TOKENS

VERSION: Final = 4
schema: Final = MetaData()
versions: Final = version_table("warmroute_ledger_schema", schema)


# id: see `batches.py`. at_ms: end of the request. request: id of the request, perhaps chosen by the client. model: the model's
# bounded name; model_name: the requested model, with aliases resolved. failed, stream, cancelled: 0 or 1. attempts: failed
# attempts. ttft_ms: -1: no byte was received. estimated: see `gateway/accounting/consumed.py`. metered: it has consumed
# tokens or images; priced: its model has a price. predicted, available: cached tokens, by the router. hours: the tokens of
# `written` with a lifetime of an hour. run, workflow: of a step of a workflow. session, agent, parent, client, user_agent: see
# `gateway/request/record.py`. code: of the gateway's own error that is the answer.
rows: Final = Table(
    "warmroute_usage",
    schema,
    *keys("id"),
    *integers("at_ms"),
    *texts("request", "tenant", "key", "model", "model_name", "alias", "pool", "replica", "endpoint"),
    *integers("status", "failed", "stream", "cancelled", "resumed", "attempts"),
    *texts("error"),
    *integers("duration_ms", "ttft_ms", "predicted", "available", "metered", "priced"),
    *texts("estimated"),
    *integers(*TOKENS, *MONEY),
    *added_texts(*ROW_GROUP),
    Index("warmroute_usage_by_time", "at_ms"),
    sqlite_with_rowid=False,
)

daily: Final = Table(
    "warmroute_usage_daily",
    schema,
    *keys(*GROUP),
    *integers(*COUNTS, *(f"{name}_{part}" for name in MONEY for part in ("mills", "pico"))),
    sqlite_with_rowid=False,
)

TABLES: Final = Tables("ledger.url", "ledger", schema, versions, VERSION, MIGRATIONS)
