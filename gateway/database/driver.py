"""The interface of a database driver.

The callers' operations are plain functions of a SQLAlchemy connection. With SQLite they run in threads, a whole transaction at
a time: that changes threads once for a transaction (aiosqlite: once for a statement). With Postgres the driver (asyncpg) is
asynchronous: they run in the event loop, in a greenlet that pauses at each statement. The functions are the same for both.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError

CONNECTIONS: Final = 4  # one for writes, the others for reads
TRIES: Final = 5  # of a transaction that conflicts with others
SQLITE: Final = "sqlite"
_CONFLICTS: Final = frozenset(["40001", "40P01", "23505"])  # SQLSTATE: serialization, deadlock, duplicate key
_VALUES: Final = "22"  # class of SQLSTATE

T = TypeVar("T")
Work = Callable[[Connection], T]


class Driver(Protocol):
    """Driver of one database. The methods raise errors of SQLAlchemy, OSError, StoreFailed, and the errors of the work. If the
    caller is cancelled, the transaction may or may not be committed.
    """

    async def open(self) -> None:
        """Connect, and create missing tables. Also raises TypeError and ValueError, for a part of the URL."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Execute statements without a transaction. At most CONNECTIONS - 1 at a time."""
        ...

    async def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Execute all in one transaction; it is durable when this returns. One at a time."""
        ...

    async def close(self) -> None: ...


def insert_each(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows without SQLAlchemy's conversion of each value, which takes longer than SQLite itself. statement: an INSERT of
    one row, compiled for this dialect; its parameters are the VALUES.

    With SQLite, one statement inserts many rows: its thread releases the interpreter at each statement, and a busy event loop
    gives it back after 5 ms. 200 statements took seconds under load.
    """
    if connection.dialect.name != SQLITE:
        connection.exec_driver_sql(statement, list(rows))
        return
    before, word, behind = statement.partition(" VALUES ")
    row, end, after = behind.partition(")")
    most = _parameters(connection) // row.count("?")
    for first in range(0, len(rows), most):
        some = rows[first : first + most]
        text = f"{before}{word}{', '.join([row + end] * len(some))}{after}"
        connection.exec_driver_sql(text, tuple(itertools.chain.from_iterable(some)))


def _parameters(connection: Connection) -> int:
    """SQLite's limit of parameters in a statement: 999 before its version 3.32, then 32,766 or more."""
    own: Any = connection.connection.dbapi_connection
    limit: int = own.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
    return limit


def is_of_a_value(error: BaseException) -> bool:
    """True if the database refuses a value: a repetition would fail as well."""
    return isinstance(error, DataError) or (isinstance(error, DBAPIError) and str(_state(error)).startswith(_VALUES))


def is_conflict(error: BaseException) -> bool:
    """True if another transaction was in conflict: a repetition may succeed."""
    return isinstance(error, DBAPIError) and _state(error) in _CONFLICTS


def _state(error: DBAPIError) -> str | None:
    """SQLSTATE; None with SQLite."""
    return getattr(error.orig, "sqlstate", None)
