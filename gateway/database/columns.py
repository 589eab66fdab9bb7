"""Columns of tables. Columns of a first version are not nullable; added columns have defaults for the release before."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Connection, Float, Integer, LargeBinary, MetaData, String, Table, inspect, text
from sqlalchemy.schema import CreateColumn


def keys(*names: str) -> list[Column[str]]:
    """Text columns of the primary key."""
    return [Column(name, String, primary_key=True) for name in names]


def texts(*names: str) -> list[Column[str]]:
    return [Column(name, String, nullable=False) for name in names]


def integers(*names: str) -> list[Column[int]]:
    """Integers of 64 bits."""
    return [Column(name, BigInteger, nullable=False) for name in names]


def small_integers(*names: str) -> list[Column[int]]:
    """Integers of 32 bits."""
    return [Column(name, Integer, nullable=False) for name in names]


def floats(*names: str) -> list[Column[float]]:
    return [Column(name, Float, nullable=False) for name in names]


def blobs(*names: str) -> list[Column[bytes]]:
    return [Column(name, LargeBinary, nullable=False) for name in names]


def added_texts(*names: str) -> list[Column[str]]:
    """Texts that the release before does not write."""
    return [Column(name, String, nullable=False, server_default="") for name in names]


def added_blobs(*names: str) -> list[Column[bytes]]:
    """Bytes that the release before does not write: null."""
    return [Column(name, LargeBinary) for name in names]


def add_missing(connection: Connection, table: Table) -> None:
    """Adds the columns that a table of an earlier version lacks."""
    there = {column["name"] for column in inspect(connection).get_columns(table.name)}
    for column in table.columns:
        if column.name not in there:
            made = CreateColumn(column).compile(dialect=connection.dialect)
            connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {made}"))


def version_table(name: str, schema: MetaData) -> Table:
    """A table for the version of a schema."""
    return Table(name, schema, Column("version", Integer, primary_key=True, autoincrement=False))
