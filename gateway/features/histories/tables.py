"""Tables of stored responses and conversations. One schema for SQLite and Postgres; other features add tables to it (runs)."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Connection, Float, Index, Integer, LargeBinary, MetaData, String, Table

from gateway.database.tables import Tables

VERSION: Final = 2

schema: Final = MetaData()
versions: Final = Table("warmroute_schema", schema, Column("version", Integer, primary_key=True, autoincrement=False))

# Times are Unix seconds. root: the first response of its tree; a tree expires as a whole. turns, size: of the history up to
# this response, in responses and bytes. emptied: it has expired, and its content was removed.
responses: Final = Table(
    "warmroute_responses",
    schema,
    Column("owner", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("parent", String, nullable=False),
    Column("root", String, nullable=False),
    Column("conversation", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("status", String, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("emptied", Integer, nullable=False),
    Column("input", LargeBinary, nullable=False),
    Column("output", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Index("warmroute_responses_by_root", "owner", "root", "expires_at"),
    Index("warmroute_responses_by_expiry", "emptied", "expires_at"),
)

conversations: Final = Table(
    "warmroute_conversations",
    schema,
    Column("owner", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("emptied", Integer, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Index("warmroute_conversations_by_expiry", "emptied", "expires_at"),
)

items: Final = Table(
    "warmroute_items",
    schema,
    Column("owner", String, primary_key=True),
    Column("conversation", String, primary_key=True),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String, nullable=False),
    Column("item", LargeBinary, nullable=False),
    Index("warmroute_items_by_id", "owner", "id", "conversation"),
)

# The response with this item in its output; the last one if an engine repeats ids.
names: Final = Table(
    "warmroute_names",
    schema,
    Column("owner", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("response", String, nullable=False),
    Index("warmroute_names_by_response", "owner", "response"),
)


def _from_version_1(_connection: Connection) -> None:
    """Version 1 lacks tables only, and missing tables are created afterwards."""


TABLES: Final = Tables("state.url", "responses", schema, versions, VERSION, {1: _from_version_1})
