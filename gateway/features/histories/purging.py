"""What has expired, some of it at a time: emptied first, and long after that forgotten.

The rows of a step are named by a subquery, not by their keys: SQLite finds rows by a list of pairs only by reading the whole
table, prompts and all, while it keeps other writers waiting. Another gateway may change what the subquery finds between two
statements (on Postgres). So names go twice: with what is emptied, and with what is forgotten.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Select, Table, delete, select, tuple_, update

from gateway.features.histories.tables import conversations, items, names, responses

TOMBSTONE_S: Final = 7 * 86_400.0
_AT_ONCE: Final = 500  # rows


def emptied(connection: Connection, now: float) -> int:
    """How many were emptied. Conversations lose their items."""
    old = _due(responses, 0, now)
    connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
    gone = _emptied(connection, responses, old, {"input": b"", "output": b"", "response": b""})
    old = _due(conversations, 0, now)
    connection.execute(delete(items).where(tuple_(items.c.owner, items.c.conversation).in_(old)))
    return gone + _emptied(connection, conversations, old, {"metadata": b"{}"})


def forgotten(connection: Connection, before: float) -> int:
    old = _due(responses, 1, before)
    connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
    gone = 0
    for table in (responses, conversations):
        made: Any = connection.execute(delete(table).where(_key(table).in_(_due(table, 1, before))))
        gone += made.rowcount
    return gone


def _emptied(connection: Connection, table: Table, old: Select[Any], values: dict[str, bytes]) -> int:
    made: Any = connection.execute(update(table).where(_key(table).in_(old)).values(emptied=1, **values))
    count: int = made.rowcount
    return count


def _due(table: Table, emptied: int, until: float) -> Select[Any]:
    """Owner and id of the next rows that have expired until then."""
    old = select(table.c.owner, table.c.id).where(table.c.emptied == emptied, table.c.expires_at <= until)
    return old.order_by(table.c.expires_at).limit(_AT_ONCE)


def _key(table: Table) -> Any:
    return tuple_(table.c.owner, table.c.id)
