"""What a database does for the store.

The store's work is plain functions of a SQLAlchemy connection. SQLite runs them in threads of the gateway, a whole transaction
at a time: one change of threads for each (aiosqlite has one for each statement). Postgres' driver (asyncpg) is asynchronous, so
there they run in the event loop, in a greenlet that pauses at each statement. The work does not know which.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError

CONNECTIONS: Final = 4  # one writes, the others read
SQLITE: Final = "sqlite"
_CONFLICTS: Final = frozenset(["40001", "40P01", "23505"])  # SQLSTATE: serialization, deadlock, the same key at once

_VALUES: Final = "22"  # class of SQLSTATE

T = TypeVar("T")
Work = Callable[[Connection], T]


class Driver(Protocol):
    """The methods raise errors of SQLAlchemy and OSError, StoreFailed, and what the work raises. A caller that is cancelled has
    given its work up: it is interrupted, and its transaction is rolled back, if it is not too late for that.
    """

    async def open(self) -> None:
        """Connect, and make the tables that are missing. Raises also TypeError and ValueError, for a part of the URL."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Each statement for itself, without a transaction. At most CONNECTIONS - 1 at a time."""
        ...

    async def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        """All in one transaction, which is durable when this returns. One at a time."""
        ...

    async def close(self) -> None: ...


def insert_each(connection: Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """statement: an INSERT of one row, compiled for this dialect, whose parameters are those of its VALUES. Without
    SQLAlchemy's work on each value, which takes longer than SQLite's.

    With SQLite, which is in a thread, many in one statement: its driver gives the interpreter up for each, and gets it back
    from an event loop that is busy after 5 ms. 200 of them took seconds under load.
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
    """How many SQLite takes in a statement: 999 before its version 3.32, else 32,766 or more."""
    own: Any = connection.connection.dbapi_connection
    limit: int = own.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)
    return limit


def is_of_a_value(error: BaseException) -> bool:
    """Whether the database refuses a value: the same once more fails as well."""
    return isinstance(error, DataError) or (isinstance(error, DBAPIError) and str(_state(error)).startswith(_VALUES))


def is_conflict(error: BaseException) -> bool:
    """Whether the same once more may go well: another transaction was in its way."""
    return isinstance(error, DBAPIError) and _state(error) in _CONFLICTS


def _state(error: DBAPIError) -> str | None:
    """SQLSTATE, which SQLite has not."""
    return getattr(error.orig, "sqlstate", None)
