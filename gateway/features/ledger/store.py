"""The ledger's database: writes batches, and removes old rows.

A batch is one transaction: its rows, and their additions to the sums of the day. A batch may be written again because its
commit is in doubt: only missing rows are inserted and summed. If the first transaction is still running, the insertion waits
for it, and fails on a duplicate key if it commits; the repetition then finds the rows. (`ON CONFLICT DO NOTHING` would add
rows to the sums that it has not inserted.)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Table, and_, bindparam, delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.database import Database
from gateway.database.driver import SQLITE, insert_each, is_of_a_value
from gateway.database.failures import StoreFailed
from gateway.features.ledger.batches import LedgerBatch, sums_of
from gateway.features.ledger.sums import GROUP
from gateway.features.ledger.tables import TABLES, daily, rows

ROWS_PER_PURGE: Final = 500
OPERATION_S: Final = 10.0


class InvalidValueError(Exception):
    """The database refuses a value of a row."""


class LedgerStore:
    """Writes batches, and removes old rows."""

    def __init__(self, database: Database) -> None:
        """database: open."""
        self._database = database

    async def write(self, batch: LedgerBatch) -> None:
        """Write a batch; it is durable when this returns. Raises StoreFailed or InvalidValueError."""
        try:
            await self._database.write(lambda connection: put(connection, batch))
        except StoreFailed as failure:
            if failure.__cause__ and is_of_a_value(failure.__cause__):
                raise InvalidValueError(str(failure)) from failure
            raise
        except OverflowError as error:  # SQLite's driver, for an integer
            raise InvalidValueError(str(error)) from error

    async def purge(self, rows_before_ms: int, days_before: str) -> int:
        """Remove some older rows and sums; returns their number. Raises StoreFailed."""
        return await self._database.write(lambda connection: purge(connection, rows_before_ms, days_before))

    async def close(self) -> None:
        await self._database.close()


async def open_ledger_store(url: str) -> LedgerStore:
    """Open the database, and create or migrate its tables. url: with a path. Raises StoreFailed."""
    database = Database(url, TABLES, OPERATION_S)
    await database.open()
    return LedgerStore(database)


def put(connection: Connection, batch: LedgerBatch) -> None:
    """Write a batch in the caller's transaction. Idempotent."""
    first, last = batch.range
    present = set(connection.execute(_PRESENT, {"first": first, "last": last}).scalars())
    missing = batch.rows()
    if present:
        missing = [row for row in missing if row[0] not in present]
    if missing:
        insert_each(connection, _insert_rows(connection.dialect), missing)
        insert_each(connection, _add_sums(connection.dialect), sums_of(missing))


def purge(connection: Connection, rows_before_ms: int, days_before: str) -> int:
    """See LedgerStore.purge."""
    old = select(rows.c.id).where(rows.c.at_ms < rows_before_ms).order_by(rows.c.at_ms).limit(ROWS_PER_PURGE)
    groups = [daily.c[name] for name in GROUP]
    past = select(*groups).where(daily.c.day < days_before).order_by(daily.c.day).limit(ROWS_PER_PURGE)
    deleted = 0
    for statement in (delete(rows).where(rows.c.id.in_(old)), delete(daily).where(tuple_(*groups).in_(past))):
        made: Any = connection.execute(statement)
        deleted += made.rowcount
    return deleted


_PRESENT: Final = select(rows.c.id).where(and_(rows.c.id >= bindparam("first"), rows.c.id <= bindparam("last")))


@lru_cache(8)
def _insert_rows(dialect: Dialect) -> str:
    return str(_statement(dialect, rows).compile(dialect=dialect))


@lru_cache(8)
def _add_sums(dialect: Dialect) -> str:
    statement = _statement(dialect, daily)
    added = {column.name: column + statement.excluded[column.name] for column in daily.c if column.name not in GROUP}
    return str(statement.on_conflict_do_update(index_elements=list(GROUP), set_=added).compile(dialect=dialect))


def _statement(dialect: Dialect, table: Table) -> Any:
    """An INSERT with parameters in the order of the columns."""
    return sqlite.insert(table) if dialect.name == SQLITE else postgresql.insert(table)
