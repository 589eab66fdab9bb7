"""Creates missing tables, and migrates tables of an earlier version.

Several gateways may open one database at the same moment. On Postgres the first gateway holds an advisory lock meanwhile (two
CREATE TABLE IF NOT EXISTS at once fail there); on SQLite the write transaction is the lock. The second gateway finds the tables
complete. All statements are one transaction: a gateway that is killed during a migration leaves the tables unchanged. If the
tables are complete, none is created, so a role without the right to create tables suffices.

Tables of a later version are refused and stay unchanged.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, insert, inspect, select, text, update
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway.database.driver import SQLITE
from gateway.database.failures import StoreFailed
from gateway.database.tables import Tables

_LOCK: Final = 0x7761726D726F7574  # of Postgres, by number: "warmrout"


def make_tables(connection: Connection, tables: Tables) -> None:
    """Create missing tables in the caller's write transaction. Raises StoreFailed for tables of another version."""
    if not _complete(connection, tables):
        if connection.dialect.name != SQLITE:
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})
        if not _complete(connection, tables):  # else another gateway has made them, and writes already
            _migrate(connection, tables)
            _make(connection, tables)
    check_version(connection, tables)


def check_version(connection: Connection, tables: Tables) -> None:
    """Raises StoreFailed unless the tables have this version."""
    found = _version(connection, tables)
    if found is None:
        raise StoreFailed(f"{tables.key}: this database has no {tables.content} in it: its gateway creates the tables")
    if found > tables.version:
        what = f"the database has version {found} of the tables of {tables.content}, made by a later release"
        raise StoreFailed(f"{what}: this release knows versions up to {tables.version}. Update it, or use another database")
    if found < tables.version:
        what = f"the database has version {found} of the tables of {tables.content}, and this release needs {tables.version}"
        raise StoreFailed(f"{what}: start a gateway of this release to migrate them")


def _complete(connection: Connection, tables: Tables) -> bool:
    there = set(inspect(connection).get_table_names())
    return {table.name for table in tables.schema.sorted_tables} <= there and _version(connection, tables) == tables.version


def _version(connection: Connection, tables: Tables) -> int | None:
    """The version of the tables; None: there are none."""
    if not inspect(connection).has_table(tables.versions.name):
        return None
    found: int | None = connection.execute(select(tables.versions.c.version)).scalar()
    return found


def _migrate(connection: Connection, tables: Tables) -> None:
    found = _version(connection, tables)
    while found is not None and found in tables.migrations:
        tables.migrations[found](connection)
        found += 1
        connection.execute(update(tables.versions).values(version=found))


def _make(connection: Connection, tables: Tables) -> None:
    """Create the tables, unless they have another version."""
    if _version(connection, tables) not in (None, tables.version):
        return
    for table in tables.schema.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))
        made = {index["name"] for index in inspect(connection).get_indexes(table.name)}
        for index in table.indexes:
            if index.name not in made:  # IF NOT EXISTS would lock the table, and writers of several tables with it
                connection.execute(CreateIndex(index))
    if _version(connection, tables) is None:
        connection.execute(insert(tables.versions).values(version=tables.version))
