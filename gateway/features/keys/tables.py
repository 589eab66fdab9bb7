"""The tables of keys and of what they have spent. One schema for SQLite and Postgres.

`body` is a key as JSON (`record.Key`), without its digests. A digest is hexadecimal. Every change of a key or of what
was spent gives it the next revision, so that processes read only what has changed, whatever their clocks say; the row of
`revisions` is written first, which puts changes in order.

A row of `spent` is what one process has done for one key on one day, in totals that only this process writes. Money is in
picodollars.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table

from gateway.database.tables import Tables

VERSION: Final = 1
schema: Final = MetaData()
versions: Final = Table("warmroute_keys_schema", schema, Column("version", Integer, primary_key=True, autoincrement=False))
revisions: Final = Table(
    "warmroute_keys_revision",
    schema,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
)
keys: Final = Table(
    "warmroute_keys",
    schema,
    Column("id", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("digests", String, nullable=False),
    Column("body", String, nullable=False),
    Index("warmroute_keys_by_revision", "revision"),
)
spent: Final = Table(
    "warmroute_keys_spent",
    schema,
    Column("day", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("process", String, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("pico", BigInteger, nullable=False),
    Index("warmroute_keys_spent_by_revision", "revision"),
)

TABLES: Final = Tables("keys.url", "keys", schema, versions, VERSION)
