"""Versions of stored workflows in a database: SQLite's and Postgres's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import Connection, insert, select, update

from gateway.database.database import Database
from gateway.features.histories.records import StoreFullError
from gateway.features.histories.sizes import OWNER_SHARE, StoredSizes, change
from gateway.features.histories.tables import ROW, TABLES, sizes, versions
from gateway.features.workflows.stored.records import (
    MAX_NAMES,
    MAX_VERSIONS,
    StoredDocument,
    StoredVersion,
    TooManyWorkflowsError,
)
from gateway.features.workflows.stored.store import DocumentStore
from gateway.features.workflows.stored.tables import workflows
from tests.gateway.features.histories.conftest import opened, response


@asynccontextmanager
async def documents(url: str, max_bytes: int = 0) -> AsyncIterator[DocumentStore]:
    database = Database(url, TABLES)
    await database.open()
    try:
        yield DocumentStore(database, StoredSizes(max_bytes), lambda: 1_000_000.0)
    finally:
        await database.close()


def document(text: str, name: str = "support") -> StoredDocument:
    return StoredDocument(name, 0, text.encode(), b"entry of " + text.encode())


async def filled(store: DocumentStore, rows: list[tuple[str, int]]) -> None:
    """An owner with these names and versions, in one transaction."""

    def work(connection: Connection) -> None:
        same = {"owner": "o", "created_at": 1.0, "document": b"x", "entry": b"y"}
        connection.execute(insert(workflows), [{**same, "name": name, "version": version} for name, version in rows])
        change(connection, "o", len(rows) * (2 + ROW))

    await store._database.write(work)


async def agrees(store: DocumentStore, owner: str = "o") -> None:
    """The counted size of an owner is that of its rows."""

    def work(connection: Connection) -> tuple[int, int]:
        rows = connection.execute(select(workflows).where(workflows.c.owner == owner)).all()
        counted = connection.execute(select(sizes.c.size).where(sizes.c.owner == owner)).scalar_one()
        return sum(len(row.document) + len(row.entry) + ROW for row in rows), counted

    stored, counted = await store._database.read(work)
    assert stored == counted


async def test_each_new_document_is_a_version_and_an_equal_one_is_none(url: str) -> None:
    async with documents(url) as store:
        assert await store.get("o", "support", None) is None
        assert await store.put("o", document("one")) == StoredVersion(1, b"")
        assert await store.put("o", document("one")) == StoredVersion(1, b"entry of one", equal=True)
        assert await store.put("o", document("two")) == StoredVersion(2, b"entry of one")
        assert await store.put("o", document("one")) == StoredVersion(3, b"entry of two"), "the way back is a version, too"
        for version, text in ((1, "one"), (2, "two"), (3, "one"), (None, "one")):
            found = await store.get("o", "support", version)
            assert found == StoredDocument("support", version or 3, text.encode(), b"entry of " + text.encode())
        assert await store.get("o", "support", 4) is None
        await agrees(store)


async def test_an_owner_sees_its_own_workflows(url: str) -> None:
    async with documents(url) as store:
        for owner in ("a", "b"):
            await store.put(owner, document(f"of {owner}"))
        await store.put("a", document("further", name="further"))
        await store.put("a", document("again"))
        found = await store.get("a", "support", 1)
        assert found
        assert found.document == b"of a"
        assert await store.entries("a") == [(1, b"entry of further"), (2, b"entry of again")]
        assert await store.entries_size("a") == len(b"entry of furtherentry of again")
        assert await store.entries("c") == []
        assert await store.entries_size("c") == 0
        assert await store.delete("b", "further") is False
        assert await store.delete("a", "support") is True
        assert await store.delete("a", "support") is False
        assert await store.get("a", "support", 1) is None
        assert await store.entries("b") == [(1, b"entry of of b")]
        await agrees(store, "a")


async def test_the_oldest_versions_are_removed(url: str) -> None:
    async with documents(url) as store:
        await filled(store, [("support", number) for number in range(1, MAX_VERSIONS + 1)])
        assert (await store.put("o", document("a"))).version == MAX_VERSIONS + 1
        assert await store.get("o", "support", 1) is None
        assert await store.get("o", "support", 2)
        await store.put("o", document("b"))
        assert await store.get("o", "support", 2) is None
        assert await store.get("o", "support", 3)
        await agrees(store)


async def test_the_names_and_the_bytes_of_an_owner_have_a_maximum(url: str) -> None:
    async with documents(url) as store:
        await filled(store, [(f"n{number}", 1) for number in range(MAX_NAMES - 1)])
        await store.put("o", document("x", name="the last"))
        with pytest.raises(TooManyWorkflowsError):
            await store.put("o", document("x", name="another"))
        assert len(await store.entries("o")) == MAX_NAMES
        await store.put("o", document("y", name="n1"))
        await store.put("other", document("x"))
        await store.delete("o", "n2")
        await store.put("o", document("x", name="new"))
        await agrees(store)
    async with documents(url, max_bytes=OWNER_SHARE * 100_000) as store:
        with pytest.raises(StoreFullError):
            await store.put("third", document("x" * 50_000))
        await store.put("third", document("x" * 100))


async def test_two_writers_of_one_name_at_once(url: str) -> None:
    """Two gateways on one database: each document gets a version of its own, without gaps."""
    async with documents(url) as one, documents(url) as other:
        stored = await asyncio.gather(
            *(store.put("o", document(f"{who} {number}")) for number in range(20) for who, store in (("1", one), ("2", other)))
        )
        assert sorted(each.version for each in stored) == list(range(1, 41))
        await agrees(one)
        await asyncio.gather(*(store.put("o", document("equal")) for store in (one, other)))
        found = await other.get("o", "support", None)
        assert found
        assert found.version == 41, "two equal documents are one version"


async def test_a_database_without_the_table_gets_it_and_keeps_its_responses(url: str) -> None:
    """Of a gateway without stored workflows, with the same version of the other tables."""
    async with opened(url) as histories:
        await histories.put(response("r", size=700))

        def back(connection: Connection) -> None:
            workflows.drop(connection)
            connection.execute(update(versions).values(version=2))  # from which sizes are counted anew

        await histories.database.write(back)
    async with documents(url) as store:
        assert (await store.put("o", document("one"))).version == 1
    async with opened(url) as histories:
        assert len((await histories.get("o", "r")).input) > 700
