"""The tables that a user of a database has there, and how those of earlier versions become them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, MetaData, Table

Migration = Callable[[Connection], None]
"""Brings the tables of one version to the next one, in its caller's transaction. What is only missing is made afterwards."""


@dataclass(frozen=True, slots=True)
class Tables:
    """key: of the configuration, the URL's. content: what is in them, for the log. schema: all of them, `versions` among them,
    which has one row. migrations: by the version that they begin with.
    """

    key: str
    content: str
    schema: MetaData
    versions: Table
    version: int
    migrations: Mapping[int, Migration] = field(default_factory=dict)
