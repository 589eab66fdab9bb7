"""Migrations of the ledger's tables, in SQL, which are never edited; `tables.py` has the latest version.

1: without `key`. 2: without `run` and `workflow`. 3: without `session`, `agent`, `parent`, `client`, `user_agent` and `code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, text

from gateway.database.tables import Migration

_COUNTS: Final = ["requests", "failed", "estimated", "unpriced", "prompt", "cached", "written", "hours", "completion", "images"]
_SUMS: Final = [
    f"{name}_{part}"
    for name in ("input", "cached_input", "cache_write", "output", "image", "saved")
    for part in ("mills", "pico")
]


def _add_key(connection: Connection) -> None:
    """Adds `key` to the rows, and copies the sums into a new table, because SQLite cannot change a primary key."""
    sums = ", ".join([*_COUNTS, *_SUMS])
    columns = ", ".join([*(f"{name} BIGINT NOT NULL" for name in (*_COUNTS, *_SUMS))])
    end = " WITHOUT ROWID" if connection.dialect.name == "sqlite" else ""
    for statement in (
        "ALTER TABLE warmroute_usage ADD COLUMN key VARCHAR DEFAULT '' NOT NULL",
        "ALTER TABLE warmroute_usage_daily RENAME TO warmroute_usage_daily_1",
        "CREATE TABLE warmroute_usage_daily (day VARCHAR NOT NULL, tenant VARCHAR NOT NULL, key VARCHAR NOT NULL,"
        f" model VARCHAR NOT NULL, pool VARCHAR NOT NULL, endpoint VARCHAR NOT NULL, {columns},"
        f" PRIMARY KEY (day, tenant, key, model, pool, endpoint)){end}",
        f"INSERT INTO warmroute_usage_daily (day, tenant, key, model, pool, endpoint, {sums})"
        f" SELECT day, tenant, '', model, pool, endpoint, {sums} FROM warmroute_usage_daily_1",
        "DROP TABLE warmroute_usage_daily_1",
    ):
        connection.execute(text(statement))


def _add_run(connection: Connection) -> None:
    _add_texts(connection, "run", "workflow")


def _add_sender(connection: Connection) -> None:
    _add_texts(connection, "session", "agent", "parent", "client", "user_agent", "code")


def _add_texts(connection: Connection, *names: str) -> None:
    """Adds columns to the rows. A gateway of the version before writes rows without them."""
    for name in names:
        connection.execute(text(f"ALTER TABLE warmroute_usage ADD COLUMN {name} VARCHAR DEFAULT '' NOT NULL"))


MIGRATIONS: Final[Mapping[int, Migration]] = {1: _add_key, 2: _add_run, 3: _add_sender}
