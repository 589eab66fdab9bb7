"""Parsing of database URLs, and the choice of the driver."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from gateway.database.driver import SQLITE, Driver
from gateway.database.failures import StoreFailed
from gateway.database.sqlite import SqliteDriver
from gateway.database.tables import Tables

_DRIVERS: Final = {SQLITE: SQLITE, "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
LIBRARIES: Final = "'asyncpg>=0.32' 'sqlalchemy[asyncio]>=2.1'"  # as in the extra `postgres`
_MEMORY: Final = ":memory:"


def parsed(url: str, key: str) -> URL:
    """Parse a URL and add the driver. key: configuration key, for errors. Raises StoreFailed."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError):
        raise StoreFailed(f"{key} is no database URL") from None
    driver = _DRIVERS.get(found.drivername)
    if driver is None:
        raise StoreFailed(f"{key}: {found.drivername!r} is not supported: use sqlite:///PATH or postgresql://USER@HOST/NAME")
    if driver == SQLITE:
        if found.database in (None, "", _MEMORY):
            raise StoreFailed(f"{key}: SQLite needs the path of a file: sqlite:///PATH")
        return found
    if importlib.util.find_spec("asyncpg") is None:
        raise StoreFailed(f"Postgres needs asyncpg, which is not installed here: pip install {LIBRARIES}")
    if "sslmode" in found.query:  # libpq's name
        found = found.difference_update_query(["sslmode"]).update_query_dict({"ssl": found.query["sslmode"]})
    return found.set(drivername=driver)


def shown(url: URL) -> str:
    """The URL for logs: SQLite's path, or user, server and name, without the password. url: from `parsed`."""
    if url.drivername == SQLITE:
        return url.database or ""
    where = {name: url.query[name] for name in ("host", "port") if name in url.query}
    return URL.create("postgresql", url.username, None, url.host, url.port, url.database, where).render_as_string()


def made(url: URL, tables: Tables, wait_s: float, lost: Callable[[], None], *, read_only: bool) -> Driver:
    """Make the driver, without connecting. url: from `parsed`. wait_s: limit of the wait for a connection while all are in use.
    lost: called once if SQLite's file was deleted or replaced. read_only: neither the file nor tables are created.
    """
    if url.drivername == SQLITE:
        return SqliteDriver(url, tables, lost, read_only=read_only)
    from gateway.database.postgres import PostgresDriver  # imports SQLAlchemy's asyncio, which SQLite does not need

    return PostgresDriver(url, tables, wait_s, read_only=read_only)
