"""The tables of keys and their spending. One schema for SQLite and Postgres.

`body` is a key as JSON (`record.Key`) without its digests. A digest is hexadecimal. Each change of a key or of its spending
gets the next revision, so that processes read only changes, independent of clocks. A transaction updates the row of `revisions`
first, which serializes changes.

A row of `spent` is the total of one process for one key on one day. Only this process writes it. Money is in picodollars.

A row of `warned` says which process has warned of the budget of a key in a period: a day (YYYY-MM-DD) or a month (YYYY-MM).
A row of `actions` is an action of an operator (`gateway/server/actions.py`), at Unix seconds, under a random id.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Float, Index, Integer, MetaData, Table

from gateway.database import columns
from gateway.database.tables import Tables

VERSION: Final = 1
schema: Final = MetaData()
versions: Final = columns.version_table("warmroute_keys_schema", schema)
revisions: Final = Table(
    "warmroute_keys_revision",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=False),
    *columns.integers("revision"),
)
keys: Final = Table(
    "warmroute_keys",
    schema,
    *columns.keys("id"),
    *columns.integers("revision"),
    *columns.texts("digests", "body"),
    Index("warmroute_keys_by_revision", "revision"),
)
spent: Final = Table(
    "warmroute_keys_spent",
    schema,
    *columns.keys("day", "key", "process"),
    *columns.integers("revision", "requests", "tokens", "pico"),
    Index("warmroute_keys_spent_by_revision", "revision"),
)

warned: Final = Table("warmroute_keys_warned", schema, *columns.keys("key", "period"), *columns.texts("process"))
actions: Final = Table(
    "warmroute_operator_actions",
    schema,
    Column("at", Float, primary_key=True),
    *columns.keys("id"),
    *columns.texts("action", "by", "client", "agent", "details"),
    *columns.small_integers("status"),
)

TABLES: Final = Tables("keys.url", "keys", schema, versions, VERSION)
