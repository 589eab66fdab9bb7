"""Reads and writes stored workflows, in the database of stored responses.

A version is never changed: a write adds one, or removes all of a name. Writers of one owner take turns, because each begins by
locking the owner's row of sizes: so versions have no gaps, also with two gateways, and the bounds are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, distinct, func, insert, select

from gateway.database.database import Database
from gateway.features.histories.sizes import StoredSizes, change
from gateway.features.histories.tables import ROW
from gateway.features.workflows.stored.records import (
    MAX_NAMES,
    MAX_VERSIONS,
    StoredDocument,
    StoredVersion,
    TooManyWorkflowsError,
)
from gateway.features.workflows.stored.tables import workflows


class DocumentStore:
    """Workflows by owner, name and version. All methods raise StoreFailed; `put` also StoreFullError. clock: Unix seconds."""

    def __init__(self, database: Database, sizes: StoredSizes, clock: Callable[[], float]) -> None:
        self._database = database
        self._sizes = sizes
        self._clock = clock

    async def get(self, owner: str, name: str, version: int | None) -> StoredDocument | None:
        """A version of a workflow; version None: the latest."""
        key = {"owner": owner, "name": name, "version": version}
        query = _LATEST if version is None else _VERSION

        def work(connection: Connection) -> Any:
            return connection.execute(query, key).first()

        row = await self._database.read(work)
        return None if row is None else StoredDocument(row.name, row.version, row.document, row.entry)

    async def put(self, owner: str, document: StoredDocument) -> StoredVersion:
        """Store a document as the next version of its name; it is durable when this returns. Its own version is not read.

        Raises TooManyWorkflowsError.
        """
        now, name = self._clock(), document.name

        def work(connection: Connection) -> StoredVersion:
            change(connection, owner, 0)  # locks it
            last = connection.execute(_LATEST, {"owner": owner, "name": name}).first()
            if last is not None and last.document == document.document:
                return StoredVersion(last.version, last.entry, equal=True)
            if last is None and connection.execute(_NAMES, {"owner": owner}).scalar_one() >= MAX_NAMES:
                raise TooManyWorkflowsError
            version = last.version + 1 if last is not None else 1
            self._sizes.add(connection, owner, len(document.document) + len(document.entry) + ROW)
            row = {"name": name, "version": version, "document": document.document, "entry": document.entry}
            connection.execute(insert(workflows).values(owner=owner, created_at=now, **row))
            if version > MAX_VERSIONS:
                _remove(connection, owner, and_(_is(owner, name), workflows.c.version <= version - MAX_VERSIONS))
            return StoredVersion(version, last.entry if last is not None else b"")

        return await self._database.write(work)

    async def delete(self, owner: str, name: str) -> bool:
        """Delete all versions of a workflow. False: there are none."""

        def work(connection: Connection) -> bool:
            change(connection, owner, 0)  # locks it
            return _remove(connection, owner, _is(owner, name)) > 0

        return await self._database.write(work)

    async def entries_size(self, owner: str) -> int:
        """Bytes of all `entries`."""

        def work(connection: Connection) -> int:
            return int(connection.execute(_ENTRIES_SIZE, {"owner": owner}).scalar_one())

        return await self._database.read(work)

    async def entries(self, owner: str) -> list[tuple[int, bytes]]:
        """Version and entry of the latest version of each workflow of an owner, by name."""

        def work(connection: Connection) -> list[tuple[int, bytes]]:
            return [(row.version, row.entry) for row in connection.execute(_ENTRIES, {"owner": owner}).all()]

        return await self._database.read(work)


def _is(owner: str, name: str) -> ColumnElement[bool]:
    return and_(workflows.c.owner == owner, workflows.c.name == name)


def _remove(connection: Connection, owner: str, which: ColumnElement[bool]) -> int:
    """Delete rows of an owner. Returns their number."""
    count, size = connection.execute(select(func.count(), func.coalesce(func.sum(_SIZE), 0)).where(which)).one()
    if count:
        connection.execute(delete(workflows).where(which))
        change(connection, owner, -(int(size) + count * ROW))
    return int(count)


_SIZE: Final = func.length(workflows.c.document) + func.length(workflows.c.entry)
_MINE: Final = workflows.c.owner == bindparam("owner")
_THIS: Final = and_(_MINE, workflows.c.name == bindparam("name"))
_LATEST: Final = select(workflows).where(_THIS).order_by(workflows.c.version.desc()).limit(1)
_VERSION: Final = select(workflows).where(_THIS, workflows.c.version == bindparam("version"))
_NAMES: Final = select(func.count(distinct(workflows.c.name))).where(_MINE)
_LAST: Final = select(workflows.c.name, func.max(workflows.c.version).label("version")).where(_MINE).group_by(workflows.c.name)
_LASTS: Final = _LAST.subquery()
_IS_LAST: Final = and_(_MINE, workflows.c.name == _LASTS.c.name, workflows.c.version == _LASTS.c.version)
_ENTRIES: Final = select(workflows.c.version, workflows.c.entry).join(_LASTS, _IS_LAST).order_by(workflows.c.name)
_ENTRIES_SIZE: Final = select(func.coalesce(func.sum(func.length(workflows.c.entry)), 0)).join(_LASTS, _IS_LAST)
