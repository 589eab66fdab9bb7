"""Purging of expired objects in small steps: first their content is emptied, long after that their rows are deleted.

On SQLite, a step selects its rows by a subquery, not by a list of keys: with a list of pairs SQLite reads the whole table with
all prompts, while other writers wait. On Postgres, another gateway may change the result of the subquery between two
statements, and the counted sizes would be wrong. So the step locks its rows first, and leaves out the locked rows of others.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Select, Table, delete, select, tuple_, update

from gateway.database.driver import SQLITE
from gateway.features.histories.sizes import release
from gateway.features.histories.tables import conversations, frames, has_name, items, names, responses

TOMBSTONE_S: Final = 7 * 86_400.0
_ROWS_PER_STEP: Final = 500
_EMPTY: Final = b"{}"
_Keys = Select[Any] | list[tuple[Any, ...]]

_NO_CONTENT: Final = {"input": b"", "output": b"", "response": b"", "digests": None, "open": None}


def emptied(connection: Connection, now: float) -> int:
    """Empties some expired responses and conversations. Returns their number."""
    old = _taken(connection, _due(responses, 0, now))
    release(connection, responses, _key(responses).in_(old), row=0)
    connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
    count = _emptied(connection, responses, old, _NO_CONTENT)
    old = _taken(connection, _due(conversations, 0, now).where(conversations.c.head == ""))
    release(connection, conversations, _key(conversations).in_(old), row=-len(_EMPTY))
    release(connection, items, tuple_(items.c.owner, items.c.conversation).in_(old))
    connection.execute(delete(items).where(tuple_(items.c.owner, items.c.conversation).in_(old)))
    return count + _emptied(connection, conversations, old, {"metadata": _EMPTY})


def delete_emptied(connection: Connection, before: float) -> int:
    """Deletes the rows of some objects that expired before that time. Returns their number."""
    count = 0
    for table in (responses, conversations):
        old = _taken(connection, _due(table, 1, before))
        if table is responses:
            connection.execute(delete(names).where(tuple_(names.c.owner, names.c.response).in_(old)))
        count += _deleted(connection, table, _key(table).in_(old))
    return count


def delete_frames(connection: Connection, now: float) -> int:
    """Deletes some expired frames. Returns their number."""
    columns = frames.c.owner, frames.c.name, frames.c.form
    due = select(*columns).where(frames.c.expires_at <= now).order_by(frames.c.expires_at).limit(_ROWS_PER_STEP)
    return _deleted(connection, frames, tuple_(*columns).in_(_taken(connection, due)))


def delete_refs(connection: Connection, now: float) -> int:
    """Deletes some expired refs. Returns their number."""
    due = _due(conversations, 0, now).where(has_name(conversations.c.head))
    return _deleted(connection, conversations, _key(conversations).in_(_taken(connection, due)))


def _taken(connection: Connection, due: Select[Any]) -> _Keys:
    """The keys of some rows that stay the same for the statements that follow."""
    if connection.dialect.name == SQLITE:  # it has one writer
        return due
    return [tuple(row) for row in connection.execute(due.with_for_update(skip_locked=True)).all()]


def _deleted(connection: Connection, table: Table, these: Any) -> int:
    release(connection, table, these)
    count: int = connection.execute(delete(table).where(these)).rowcount
    return count


def _emptied(connection: Connection, table: Table, old: _Keys, values: dict[str, bytes | None]) -> int:
    made: Any = connection.execute(update(table).where(_key(table).in_(old)).values(emptied=1, **values))
    count: int = made.rowcount
    return count


def _due(table: Table, emptied: int, until: float) -> Select[Any]:
    """Selects owner and id of the next rows that expire by then."""
    old = select(table.c.owner, table.c.id).where(table.c.emptied == emptied, table.c.expires_at <= until)
    return old.order_by(table.c.expires_at).limit(_ROWS_PER_STEP)


def _key(table: Table) -> Any:
    return tuple_(table.c.owner, table.c.id)
