"""Purging of expired objects in small steps: first their content is emptied, long after that their rows are deleted.

A step selects its rows by a subquery, not by a list of keys: with a list of pairs SQLite reads the whole table with all
prompts, while other writers wait. On Postgres, another gateway may change the result of the subquery between two statements. So
names are deleted twice: when a response is emptied, and when its row is deleted.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Select, Table, delete, select, tuple_, update

from gateway.features.histories.sizes import release
from gateway.features.histories.tables import conversations, frames, items, names, responses

TOMBSTONE_S: Final = 7 * 86_400.0
_ROWS_PER_STEP: Final = 500
_EMPTY: Final = b"{}"
_NO_CONTENT: Final = {"input": b"", "output": b"", "response": b"", "digests": None, "open": None}


def emptied(connection: Connection, now: float) -> int:
    """Empties some expired responses and conversations. Returns their number."""
    old = _due(responses, 0, now)
    release(connection, responses, _key(responses).in_(old), row=0)
    connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
    count = _emptied(connection, responses, old, _NO_CONTENT)
    old = _due(conversations, 0, now).where(conversations.c.head == "")
    release(connection, conversations, _key(conversations).in_(old), row=-len(_EMPTY))
    release(connection, items, tuple_(items.c.owner, items.c.conversation).in_(old))
    connection.execute(delete(items).where(tuple_(items.c.owner, items.c.conversation).in_(old)))
    return count + _emptied(connection, conversations, old, {"metadata": _EMPTY})


def delete_emptied(connection: Connection, before: float) -> int:
    """Deletes the rows of some objects that expired before that time. Returns their number."""
    old = _due(responses, 1, before)
    connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
    count = 0
    for table in (responses, conversations):
        release(connection, table, _key(table).in_(_due(table, 1, before)))
        made: Any = connection.execute(delete(table).where(_key(table).in_(_due(table, 1, before))))
        count += made.rowcount
    return count


def delete_frames(connection: Connection, now: float) -> int:
    """Deletes some expired frames. Returns their number."""
    columns = frames.c.owner, frames.c.name, frames.c.form
    due = select(*columns).where(frames.c.expires_at <= now).order_by(frames.c.expires_at).limit(_ROWS_PER_STEP)
    old = tuple_(*columns).in_(due)
    release(connection, frames, old)
    return connection.execute(delete(frames).where(old)).rowcount


def delete_refs(connection: Connection, now: float) -> int:
    """Deletes some expired refs. Returns their number."""
    old = _key(conversations).in_(_due(conversations, 0, now).where(conversations.c.head != ""))
    release(connection, conversations, old)
    return connection.execute(delete(conversations).where(old)).rowcount


def _emptied(connection: Connection, table: Table, old: Select[Any], values: dict[str, bytes | None]) -> int:
    made: Any = connection.execute(update(table).where(_key(table).in_(old)).values(emptied=1, **values))
    count: int = made.rowcount
    return count


def _due(table: Table, emptied: int, until: float) -> Select[Any]:
    """Selects owner and id of the next rows that expire by then."""
    old = select(table.c.owner, table.c.id).where(table.c.emptied == emptied, table.c.expires_at <= until)
    return old.order_by(table.c.expires_at).limit(_ROWS_PER_STEP)


def _key(table: Table) -> Any:
    return tuple_(table.c.owner, table.c.id)
