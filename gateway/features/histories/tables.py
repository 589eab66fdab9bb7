"""Tables of stored responses and conversations. One schema for SQLite and Postgres; other features add tables to it (runs)."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    func,
    literal,
    literal_column,
    select,
    text,
    union_all,
)

from gateway.database.columns import (
    add_missing,
    added_blobs,
    added_texts,
    blobs,
    floats,
    integers,
    keys,
    small_integers,
    texts,
    version_table,
)
from gateway.database.tables import Tables

VERSION: Final = 7

schema: Final = MetaData()
versions: Final = version_table("warmroute_schema", schema)

# Rows in the indexes of heads, frames and refs; ordinary responses and conversations have none.
_NAMED: Final = {name: text(f"{name} <> ''") for name in ("head", "input_head", "frame")}


def _named(index: str, name: str, *columns: str) -> Index:
    """An index of the rows with a name."""
    return Index(index, *columns, sqlite_where=_NAMED[name], postgresql_where=_NAMED[name])


def has_name(column: Column[Any]) -> ColumnElement[bool]:
    """Condition for rows in the index of this name. The text is no parameter: with one, SQLite prepares the statement anew at
    each execution, because only its value shows that the index fits.
    """
    return column != literal_column("''")


# Times are Unix seconds. root: the first response of its tree; a tree expires as a whole. turns, size: of the history up to
# this response, in responses and bytes. emptied: it has expired, and its content was removed.
#
# Of turns of prompt logs: head, input_head: names of the log with and without the answer, "": the row is an ordinary response.
# form: the dialect of input and output. frame: its name. after_input: the turn goes on from its parent's input, not from its
# answer. issuer: the pool that made its sealed parts. digests: of the entries, 32 bytes each. open: ids of the calls without a
# result, after the input and after the output (JSON). request_id: of the request that has stored it.
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
    *added_texts("head", "input_head"),
    Column("form", String, nullable=False, server_default="responses"),
    *added_texts("frame", "issuer"),
    Column("after_input", Integer, nullable=False, server_default="0"),
    *added_blobs("digests", "open"),
    *added_texts("request_id"),
    Index("warmroute_responses_by_root", "owner", "root", "expires_at"),
    Index("warmroute_responses_by_expiry", "emptied", "expires_at"),
    _named("warmroute_responses_by_head", "head", "owner", "head"),
    _named("warmroute_responses_by_input_head", "input_head", "owner", "input_head"),
    _named("warmroute_responses_by_frame", "frame", "owner", "frame"),
    _named("warmroute_responses_by_parent", "head", "owner", "parent", "created_at"),
)


def unexpired(now: Any) -> Any:
    """Condition for responses that have not expired. With `emptied = 0` SQLite would prefer the index by expiry, with all of
    them, to all others. Postgres estimates a range well, but no expression such as `emptied + 0`.
    """
    return and_(responses.c.emptied < 1, responses.c.expires_at > now)


# Frames of prompt logs, in the form of a dialect: members of a body. A frame lives as long as the last turn stored with it.
frames: Final = Table(
    "warmroute_frames",
    schema,
    *keys("owner", "name", "form"),
    *blobs("body"),
    *floats("expires_at"),
    Index("warmroute_frames_by_expiry", "expires_at"),
)

# head: of a ref, a name of a log that can be moved, with the id `ref:NAME`; "": the row is a conversation.
conversations: Final = Table(
    "warmroute_conversations",
    schema,
    *keys("owner", "id"),
    *floats("created_at", "expires_at"),
    *small_integers("emptied"),
    *blobs("metadata"),
    *added_texts("head"),
    _named("warmroute_conversations_refs", "head", "owner"),
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
_FIRST_CONTENTS: Final = {  # of the tables' first version
    responses: func.length(responses.c.input) + func.length(responses.c.output) + func.length(responses.c.response),
    conversations: func.length(conversations.c.metadata),
    items: func.length(items.c.item),
}
CONTENTS: Final = {
    **_FIRST_CONTENTS,
    responses: _FIRST_CONTENTS[responses]
    + func.coalesce(func.length(responses.c.digests), 0)
    + func.coalesce(func.length(responses.c.open), 0),
    frames: func.length(frames.c.body),
}


def _from_version_1(_connection: Connection) -> None:
    """Version 1 lacks tables only, and missing tables are created afterwards."""


def _from_version_2(connection: Connection) -> None:
    """Counts all objects. O(rows)."""
    parts = [select(table.c.owner, (size + literal(ROW)).label("size")) for table, size in _FIRST_CONTENTS.items()]
    every = union_all(*parts).subquery()
    sums = select(every.c.owner, func.sum(every.c.size)).group_by(every.c.owner)
    sizes.create(connection, checkfirst=True)
    connection.execute(sizes.delete())
    connection.execute(sizes.insert().from_select(["owner", "size"], sums))


def _from_version_3(connection: Connection) -> None:
    """Adds the columns of prompt logs, which the release before leaves at their defaults. O(1)."""
    add_missing(connection, responses)


def _from_version_4(connection: Connection) -> None:
    """Adds the column of refs. O(1)."""
    add_missing(connection, conversations)


def _from_version_5(connection: Connection) -> None:
    """Adds the column of request ids. O(1)."""
    add_missing(connection, responses)


def _from_version_6(_connection: Connection) -> None:
    """Version 6 lacks an index only, and missing indexes are created afterwards."""


_MIGRATIONS: Final = {
    1: _from_version_1,
    2: _from_version_2,
    3: _from_version_3,
    4: _from_version_4,
    5: _from_version_5,
    6: _from_version_6,
}
TABLES: Final = Tables("state.url", "responses", schema, versions, VERSION, _MIGRATIONS)
