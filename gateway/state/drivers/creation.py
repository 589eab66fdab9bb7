"""The tables, made where they are missing.

Several gateways may open one database at the same moment. On Postgres the first one holds a lock while it makes the tables
(CREATE TABLE IF NOT EXISTS fails there when two do it at once), on SQLite a transaction that writes is such a lock. Nothing is
made where all is there, so a role without the right to create tables will do then.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, insert, inspect, select, text, update
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway.state.drivers.driver import SQLITE
from gateway.state.records import StoreFailed
from gateway.state.tables import UPGRADED, VERSION, schema, versions

_LOCK: Final = 0x7761726D726F7574  # of Postgres, by number: "warmrout"


def make_tables(connection: Connection) -> None:
    """Those that are missing, in a transaction that writes. Raises StoreFailed for tables of another version."""
    if not _complete(connection):
        if connection.dialect.name != SQLITE:
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK})
        _make(connection)
    found = connection.execute(select(versions.c.version)).scalars().all()
    if list(found) != [VERSION]:
        raise StoreFailed(f"the database has version {found[0]} of the tables, and this gateway needs {VERSION}")


def _complete(connection: Connection) -> bool:
    there = set(inspect(connection).get_table_names())
    return {table.name for table in schema.sorted_tables} <= there and bool(
        connection.execute(select(versions.c.version)).first()
    )


def _make(connection: Connection) -> None:
    for table in schema.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))
        for index in table.indexes:
            connection.execute(CreateIndex(index, if_not_exists=True))
    if not connection.execute(select(versions.c.version)).first():
        connection.execute(insert(versions).values(version=VERSION))
    connection.execute(update(versions).where(versions.c.version == UPGRADED).values(version=VERSION))
