"""Description of a set of tables in a database, with its migrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, MetaData, Table

Migration = Callable[[Connection], None]
"""Migrates the tables of one version to the next, in the caller's transaction. Missing tables are created afterwards."""


@dataclass(frozen=True, slots=True)
class Tables:
    """A set of tables. key: configuration key of the URL. content: a word for the log. schema: all tables, with `versions`,
    which has one row. migrations: by the version that they start from.
    """

    key: str
    content: str
    schema: MetaData
    versions: Table
    version: int
    migrations: Mapping[int, Migration] = field(default_factory=dict)
