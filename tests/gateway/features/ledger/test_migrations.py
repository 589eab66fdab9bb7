"""A ledger of an earlier version becomes this one's in place, once; one of a later version is left alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, inspect, text

from gateway.database.database import Database
from gateway.database.failures import StoreFailed
from gateway.database.tables import Tables
from gateway.features.ledger.migrations import MIGRATIONS
from gateway.features.ledger.store import open_ledger_store
from gateway.features.ledger.tables import TABLES, VERSION
from tests.gateway.features.ledger.conftest import NOON, Entries, all_rows, all_sums, maker, record, stored
from tests.gateway.features.ledger.test_store import check

OLD_ROW = (
    *("id", "at_ms", "request", "tenant", "model", "model_name", "alias", "pool", "replica", "endpoint", "status", "failed"),
    *("stream", "cancelled", "resumed", "attempts", "error", "duration_ms", "ttft_ms", "predicted", "available", "metered"),
    *("priced", "estimated", "prompt", "cached", "written", "hours", "completion", "images"),
    *("input", "cached_input", "cache_write", "output", "image", "saved"),
)
TEXTS = {"id", "request", "tenant", "model", "model_name", "alias", "pool", "replica", "endpoint", "error", "estimated"}
OLD_GROUP = ("day", "tenant", "model", "pool", "endpoint")
OLD_SUMS = (
    *("requests", "failed", "estimated", "unpriced", "prompt", "cached", "written", "hours", "completion", "images"),
    *(f"{name}_{part}" for name in OLD_ROW[-6:] for part in ("mills", "pico")),
)


def make_version_1(connection: Connection) -> None:
    """As the release of version 1 has made it, with two rows of one group."""
    end = " WITHOUT ROWID" if connection.dialect.name == "sqlite" else ""
    columns = ", ".join(f"{name} {'VARCHAR' if name in TEXTS else 'BIGINT'} NOT NULL" for name in OLD_ROW)
    groups = ", ".join(f"{name} VARCHAR NOT NULL" for name in OLD_GROUP)
    sums = ", ".join(f"{name} BIGINT NOT NULL" for name in OLD_SUMS)
    values = [f"'{name}'" if name in TEXTS else "1" for name in OLD_ROW[1:]]
    values[0] = "1764244800000"
    for statement in (
        "CREATE TABLE warmroute_ledger_schema (version INTEGER NOT NULL, PRIMARY KEY (version))",
        "INSERT INTO warmroute_ledger_schema VALUES (1)",
        f"CREATE TABLE warmroute_usage ({columns}, PRIMARY KEY (id)){end}",
        "CREATE INDEX warmroute_usage_by_time ON warmroute_usage (at_ms)",
        f"CREATE TABLE warmroute_usage_daily ({groups}, {sums}, PRIMARY KEY ({', '.join(OLD_GROUP)})){end}",
        *(f"INSERT INTO warmroute_usage VALUES ('{id_}', {', '.join(values)})" for id_ in ("a", "b")),
        "INSERT INTO warmroute_usage_daily VALUES ('2025-11-27', 'tenant', 'model', 'pool', 'endpoint',"
        f" 2, 2, 2, 0, {', '.join(['2'] * 6)}, {', '.join(['0, 2'] * 6)})",
    ):
        connection.execute(text(statement))


async def with_version_1(url: str) -> None:
    """As its gateway would leave it."""
    schema = MetaData()
    versions = Table("t_schema", schema, Column("version", Integer, primary_key=True))
    database = Database(url, Tables("t.url", "a test", schema, versions, 1))
    await database.open()
    await database.write(make_version_1)
    await database.close()


def shape(connection: Connection) -> dict[str, Any]:
    """Columns by table, without their order, which an added column does not have."""
    found = inspect(connection)
    names = [table.name for table in TABLES.schema.sorted_tables]
    return {
        name: (
            {(each["name"], str(each["type"]), each["nullable"]) for each in found.get_columns(name)},
            found.get_pk_constraint(name)["constrained_columns"],
            {(each["name"], tuple(each["column_names"])) for each in found.get_indexes(name)},
        )
        for name in names
    }


async def test_version_1_is_migrated_in_place(url: str) -> None:
    await with_version_1(url)
    async with stored(url) as (store, database):
        found = await check(database)
        assert [(row["id"], row["key"], row["tenant"], row["saved"]) for row in found] == [
            ("a", "", "tenant", 1),
            ("b", "", "tenant", 1),
        ]
        await store.write(maker().batch(Entries().of(record(key="k"), record(key="k2")), NOON))
        assert len(await check(database)) == 4
        assert await database.read(version) == [VERSION]


async def with_version_2(url: str) -> None:
    """Version 1, migrated by the release of version 2."""
    await with_version_1(url)
    schema = MetaData()
    versions = Table("warmroute_ledger_schema", schema, Column("version", Integer, primary_key=True))
    database = Database(url, Tables(TABLES.key, TABLES.content, schema, versions, 2, {1: MIGRATIONS[1]}))
    await database.open()
    await database.close()


async def test_version_2_gets_runs_and_its_gateways_go_on_to_write(url: str) -> None:
    await with_version_2(url)
    async with stored(url) as (store, database):
        fields = {"run": "run_1", "workflow": "support"}
        await store.write(maker().batch(Entries().of(record(fields=fields), record()), NOON))
        names = ", ".join(name for name in (*OLD_ROW, "key"))
        values = ", ".join("'z'" if name in TEXTS | {"key"} else "1" for name in (*OLD_ROW, "key"))
        statement = text(f"INSERT INTO warmroute_usage ({names}) VALUES ({values})")
        await database.write(lambda connection: connection.execute(statement))
        found = await database.read(all_rows)
        assert [(row["run"], row["workflow"]) for row in found if row["tenant"] == "t"] == [("run_1", "support"), ("", "")]
        assert {(row["run"], row["workflow"]) for row in found if row["tenant"] != "t"} == {("", "")}
        assert len(found) == 5
        assert await database.read(version) == [VERSION]


async def with_version_3(url: str) -> None:
    """Version 1, migrated by the release of version 3."""
    await with_version_1(url)
    schema = MetaData()
    versions = Table("warmroute_ledger_schema", schema, Column("version", Integer, primary_key=True))
    earlier = {before: MIGRATIONS[before] for before in (1, 2)}
    database = Database(url, Tables(TABLES.key, TABLES.content, schema, versions, 3, earlier))
    await database.open()
    await database.close()


async def test_version_3_gets_senders_and_its_gateways_go_on_to_write(url: str) -> None:
    await with_version_3(url)
    async with stored(url) as (store, database):
        sender = {
            "session": "s-1",
            "agent": "a-1",
            "parent": "a-0",
            "client": "10.0.0.7",
            "user_agent": "curl/8",
            "code": "overloaded",
        }
        await store.write(maker().batch(Entries().of(record(**sender)), NOON))
        there = (*OLD_ROW, "key", "run", "workflow")
        names = ", ".join(there)
        values = ", ".join("'z'" if name in {*TEXTS, "key", "run", "workflow"} else "1" for name in there)
        statement = text(f"INSERT INTO warmroute_usage ({names}) VALUES ({values})")
        await database.write(lambda connection: connection.execute(statement))
        found = {tuple(row[name] for name in ("tenant", *sender)) for row in await database.read(all_rows)}
        assert found == {("t", *sender.values()), ("tenant", *[""] * 6), ("z", *[""] * 6)}
        assert await database.read(version) == [VERSION]


async def test_what_was_migrated_has_the_shape_of_what_is_new(url: str, request: pytest.FixtureRequest, tmp_path: Any) -> None:
    new = request.getfixturevalue("server").new() if url.startswith("postgres") else f"sqlite:///{tmp_path}/new.sqlite"
    await with_version_1(url)
    async with stored(url) as (_, migrated), stored(new) as (_, made):
        assert await migrated.read(shape) == await made.read(shape)


async def test_of_gateways_that_start_at_once_one_migrates(url: str) -> None:
    await with_version_1(url)
    stores = await asyncio.gather(*(open_ledger_store(url) for _ in range(6)))
    batches = [maker(at).batch(Entries().of(record()), NOON) for at in range(6)]
    await asyncio.gather(*(store.write(batch) for store, batch in zip(stores, batches, strict=True)))
    async with stored(url) as (_, database):
        assert len(await check(database)) == 8
        assert await database.read(version) == [VERSION]
    for store in stores:
        await store.close()


async def test_a_migration_that_breaks_off_leaves_what_was_there(url: str) -> None:
    await with_version_1(url)

    def broken(connection: Connection) -> None:
        MIGRATIONS[1](connection)
        raise StoreFailed("killed")

    tables = Tables(TABLES.key, TABLES.content, TABLES.schema, TABLES.versions, VERSION, {1: broken})
    with pytest.raises(StoreFailed, match="killed"):
        await Database(url, tables).open()
    async with stored(url) as (_, database):
        assert len(await check(database)) == 2


async def test_a_later_version_is_refused_and_untouched(url: str) -> None:
    async with stored(url) as (store, database):
        await store.write(maker().batch(Entries().of(record()), NOON))
        await database.write(lambda each: each.execute(text("UPDATE warmroute_ledger_schema SET version = 99")))
        before = await database.read(all_rows), await database.read(all_sums)
        with pytest.raises(StoreFailed, match=r"version 99 .* a later release: this release knows versions up to 4"):
            await open_ledger_store(url)
        assert (await database.read(all_rows), await database.read(all_sums)) == before
        assert await database.read(version) == [99]


async def test_a_reader_does_not_migrate(url: str) -> None:
    await with_version_1(url)
    with pytest.raises(StoreFailed, match="version 1 of the tables of ledger, and this release needs 4"):
        await Database(url, TABLES, read_only=True).open()
    async with stored(url):
        pass
    reader = Database(url, TABLES, read_only=True)
    await reader.open()
    await reader.close()


async def test_a_version_that_nothing_leads_from_is_refused(url: str) -> None:
    tables = Tables(TABLES.key, TABLES.content, TABLES.schema, TABLES.versions, VERSION, {})
    await with_version_1(url)
    with pytest.raises(StoreFailed, match="needs 4"):
        await Database(url, tables).open()


def version(connection: Connection) -> list[int]:
    return list(connection.execute(text("SELECT version FROM warmroute_ledger_schema")).scalars())


def test_every_earlier_version_has_a_way_to_this_one() -> None:
    assert set(MIGRATIONS) == set(range(1, VERSION))
