"""Columns of tables, none of them nullable."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Integer, LargeBinary, MetaData, String, Table


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


def version_table(name: str, schema: MetaData) -> Table:
    """A table for the version of a schema."""
    return Table(name, schema, Column("version", Integer, primary_key=True, autoincrement=False))
