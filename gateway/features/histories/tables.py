"""Tables of stored responses and conversations. One schema for SQLite and Postgres; other features add tables to it (runs)."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Connection, Index, MetaData, Table, func, literal, select, union_all

from gateway.database.columns import blobs, floats, integers, keys, small_integers, texts, version_table
from gateway.database.tables import Tables

VERSION: Final = 3

schema: Final = MetaData()
versions: Final = version_table("warmroute_schema", schema)

# Times are Unix seconds. root: the first response of its tree; a tree expires as a whole. turns, size: of the history up to
# this response, in responses and bytes. emptied: it has expired, and its content was removed.
responses: Final = Table(
    "warmroute_responses",
    schema,
    *keys("owner", "id"),
    *texts("parent", "root", "conversation"),
    *floats("created_at", "expires_at"),
    *texts("status"),
    *small_integers("turns"),
    *integers("size"),
    *small_integers("emptied"),
    *blobs("input", "output", "response"),
    Index("warmroute_responses_by_root", "owner", "root", "expires_at"),
    Index("warmroute_responses_by_expiry", "emptied", "expires_at"),
)

conversations: Final = Table(
    "warmroute_conversations",
    schema,
    *keys("owner", "id"),
    *floats("created_at", "expires_at"),
    *small_integers("emptied"),
    *blobs("metadata"),
    Index("warmroute_conversations_by_expiry", "emptied", "expires_at"),
)

items: Final = Table(
    "warmroute_items",
    schema,
    *keys("owner", "conversation"),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    *texts("id"),
    *blobs("item"),
    Index("warmroute_items_by_id", "owner", "id", "conversation"),
)

# Item id -> the response with this item in its output; the latest response if an engine repeats ids.
names: Final = Table(
    "warmroute_names",
    schema,
    *keys("owner", "id"),
    *texts("response"),
    Index("warmroute_names_by_response", "owner", "response"),
)


# Bytes of the objects of each owner (`sizes.py`).
sizes: Final = Table("warmroute_sizes", schema, *keys("owner"), *integers("size"))
ROW: Final = 256  # bytes of a row beside its content
CONTENTS: Final = {
    responses: func.length(responses.c.input) + func.length(responses.c.output) + func.length(responses.c.response),
    conversations: func.length(conversations.c.metadata),
    items: func.length(items.c.item),
}


def _from_version_1(_connection: Connection) -> None:
    """Version 1 lacks tables only, and missing tables are created afterwards."""


def _from_version_2(connection: Connection) -> None:
    """Counts all objects. O(rows)."""
    parts = [select(table.c.owner, (size + literal(ROW)).label("size")) for table, size in CONTENTS.items()]
    every = union_all(*parts).subquery()
    sums = select(every.c.owner, func.sum(every.c.size)).group_by(every.c.owner)
    sizes.create(connection, checkfirst=True)
    connection.execute(sizes.delete())
    connection.execute(sizes.insert().from_select(["owner", "size"], sums))


TABLES: Final = Tables("state.url", "responses", schema, versions, VERSION, {1: _from_version_1, 2: _from_version_2})
