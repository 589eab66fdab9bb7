"""The ledger's database: batches go in, what is past its time goes out.

A batch is one transaction: its rows, and what they add to the sums of their day. A batch that is written again, since its
commit was in doubt, adds what is not there: its rows are looked for first, and only those that are missing are inserted and
summed. If the transaction in doubt is still under way, the insertion waits for it and fails on the same key if it does commit:
then all of it is done again, and finds the rows (`ON CONFLICT DO NOTHING` would add to the sums what it has not inserted).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Table, and_, bindparam, delete, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from gateway.accounting.ledger.batches import Batch, sums_of
from gateway.accounting.ledger.sums import GROUP
from gateway.accounting.ledger.tables import TABLES, daily, rows
from gateway.database.database import Database
from gateway.database.driver import SQLITE, insert_each, is_of_a_value
from gateway.database.failures import StoreFailed

PURGED_AT_ONCE: Final = 500  # rows
OPERATION_S: Final = 10.0


class UnfitError(Exception):
    """The database refuses a value of a row."""


class LedgerStore:
    """See the top of this file."""

    def __init__(self, database: Database) -> None:
        """database: open."""
        self._database = database

    async def write(self, batch: Batch) -> None:
        """Returns when it is durable. Raises StoreFailed, or UnfitError."""
        try:
            await self._database.write(lambda connection: put(connection, batch))
        except StoreFailed as failure:
            if failure.__cause__ and is_of_a_value(failure.__cause__):
                raise UnfitError(str(failure)) from failure
            raise
        except OverflowError as error:  # SQLite's driver, of an integer
            raise UnfitError(str(error)) from error

    async def purge(self, rows_before_ms: int, days_before: str) -> int:
        """Remove some of what is older; returns how much. Raises StoreFailed."""
        return await self._database.write(lambda connection: purge(connection, rows_before_ms, days_before))

    async def close(self) -> None:
        await self._database.close()


async def opened(url: str) -> LedgerStore:
    """url: with a path. Makes and migrates the tables. Raises StoreFailed."""
    database = Database(url, TABLES, OPERATION_S)
    await database.open()
    return LedgerStore(database)


def put(connection: Connection, batch: Batch) -> None:
    """In the transaction of its caller. Harmless if it is done again."""
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
    old = select(rows.c.id).where(rows.c.at_ms < rows_before_ms).order_by(rows.c.at_ms).limit(PURGED_AT_ONCE)
    groups = [daily.c[name] for name in GROUP]
    past = select(*groups).where(daily.c.day < days_before).order_by(daily.c.day).limit(PURGED_AT_ONCE)
    gone = 0
    for statement in (delete(rows).where(rows.c.id.in_(old)), delete(daily).where(tuple_(*groups).in_(past))):
        made: Any = connection.execute(statement)
        gone += made.rowcount
    return gone


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
    """Its parameters are in the order of the columns."""
    return sqlite.insert(table) if dialect.name == SQLITE else postgresql.insert(table)
