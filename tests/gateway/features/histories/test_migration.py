"""Databases of versions 3 to 6 are migrated, with their data, while a gateway of the release before writes to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.util import await_only

from gateway.database.database import Database
from gateway.database.tables import Tables
from gateway.features.histories import tables
from gateway.features.histories.records import NO_NAMES
from gateway.features.prompt_log.once.tables import once
from tests.gateway.features.histories.conftest import Clock, opened, response
from tests.gateway.features.histories.test_turns import turn
from tests.support.postgres import Postgres

_TEXTS = "owner, id, parent, root, conversation, created_at, expires_at, status"
_COLUMNS = f"{_TEXTS}, turns, size, emptied, input, output, response"
# The statements of version 3. Its other tables are those of today.
_CREATE = """CREATE TABLE warmroute_responses (owner VARCHAR NOT NULL, id VARCHAR NOT NULL, parent VARCHAR NOT NULL,
 root VARCHAR NOT NULL, conversation VARCHAR NOT NULL, created_at FLOAT NOT NULL, expires_at FLOAT NOT NULL,
 status VARCHAR NOT NULL, turns INTEGER NOT NULL, size BIGINT NOT NULL, emptied INTEGER NOT NULL, input {bytes} NOT NULL,
 output {bytes} NOT NULL, response {bytes} NOT NULL, PRIMARY KEY (owner, id))"""
_ADD = f"INSERT INTO warmroute_responses ({_COLUMNS}) VALUES ({', '.join(f':{name}' for name in _COLUMNS.split(', '))})"
_EMPTY = "UPDATE warmroute_responses SET emptied=1, input=:none, output=:none, response=:none WHERE id=:id"


def row(id_: str, parent: str = "", **more: Any) -> dict[str, Any]:
    made = response(id_, parent)
    size = len(made.input) + len(made.output) + 2
    tree = {"root": parent or id_, "turns": 2 if parent else 1, "size": size * (2 if parent else 1), "emptied": 0}
    written = {name: getattr(made, name) for name in _COLUMNS.split(", ") if hasattr(made, name)}
    return {**written, **tree, "expires_at": 1_000_900.0, **more}


# The statements of version 4.
_CREATE_4 = """CREATE TABLE warmroute_conversations (owner VARCHAR NOT NULL, id VARCHAR NOT NULL, created_at FLOAT NOT NULL,
 expires_at FLOAT NOT NULL, emptied INTEGER NOT NULL, metadata {bytes} NOT NULL, PRIMARY KEY (owner, id))"""
_CONVERSATION = """INSERT INTO warmroute_conversations (owner, id, created_at, expires_at, emptied, metadata)
 VALUES ('o', :id, 5.0, 1000900.0, 0, :metadata)"""
_TURN = """INSERT INTO warmroute_responses (owner, id, parent, root, conversation, created_at, expires_at, status, turns, size,
 emptied, input, output, response, head, input_head, form, frame, after_input, issuer, digests, open) VALUES ('o', :id, '', :id,
 '', 5.0, 1000900.0, 'completed', 1, 5, 0, :none, :none, :none, 'pl1_a', 'pl1_b', 'chat', 'pf1_c', 0, '', :none, NULL)"""


def version_5(connection: Connection) -> None:
    """The table of responses as the release before has left it."""
    connection.execute(text("ALTER TABLE warmroute_responses DROP COLUMN request_id"))
    connection.execute(text("UPDATE warmroute_schema SET version = 5"))


def version_6(connection: Connection) -> None:
    """The table of responses as the release before has left it."""
    connection.execute(text("DROP INDEX warmroute_responses_by_parent"))
    connection.execute(text("UPDATE warmroute_schema SET version = 6"))


async def test_a_database_of_version_6_gets_the_index_that_it_lacks(url: str) -> None:
    async with opened(url) as before:
        await before.put_turn(turn("t", head="pl1_t"))
        await before.database.write(version_6)
        async with opened(url) as store:
            await before.put_turn(turn("u", "t", head="pl1_u"))
            assert await store.going_on("o", "pl1_t", await store.turns_at("o", "pl1_t"))

            def indexes(connection: Connection) -> set[str | None]:
                return {index["name"] for index in inspect(connection).get_indexes("warmroute_responses")}

            assert "warmroute_responses_by_parent" in await store.database.read(indexes)


@pytest.mark.tools
async def test_a_migration_locks_no_table_that_it_leaves_as_it_is(server: Postgres) -> None:
    """A writer that holds up the migration of one table goes on to the others; else both would wait for each other."""
    url, written, end = server.new(), asyncio.Event(), asyncio.Event()

    def writes(connection: Connection) -> None:
        connection.execute(text("LOCK TABLE warmroute_responses IN ROW EXCLUSIVE MODE"))
        written.set()
        await_only(end.wait())

    def waiting(connection: Connection) -> bool:
        return bool(connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one())

    def shared(connection: Connection) -> list[Any]:
        held = text("SELECT relation::regclass::text FROM pg_locks WHERE granted AND mode = 'ShareLock'")
        return list(connection.execute(held).scalars())

    async with opened(url) as before:
        await before.database.write(version_6)
        writer = asyncio.create_task(before.database.write(writes))
        await written.wait()
        database = Database(url, tables.TABLES)
        opening = asyncio.create_task(database.open())
        while not await before.database.read(waiting):
            assert not opening.done()
        held = await before.database.read(shared)
        end.set()
        await asyncio.gather(writer, opening)
        await database.close()
        assert held == []


@pytest.mark.tools
async def test_a_migration_that_ends_in_a_deadlock_is_tried_again(server: Postgres) -> None:
    url, tries = server.new(), list[Connection]()

    def conflicts(connection: Connection) -> None:
        tries.append(connection)
        if len(tries) == 1:
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40P01'; END $$"))

    async with opened(url) as before:
        await before.database.write(version_6)
    database = Database(url, replace(tables.TABLES, migrations={6: conflicts}))
    await database.open()
    await database.close()
    assert len(tries) == 2


def version_4(connection: Connection) -> None:
    """The tables of conversations, of frames and of tokens as the release before has left them."""
    connection.execute(text("DROP TABLE warmroute_conversations"))
    connection.execute(text("DROP TABLE warmroute_once"))
    connection.execute(text("DROP INDEX IF EXISTS warmroute_responses_by_frame"))
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(text(_CREATE_4.format(bytes=kind)))
    connection.execute(text("UPDATE warmroute_schema SET version = 4"))
    connection.execute(text(_CONVERSATION), {"id": "conv_1", "metadata": b"{}"})


def version_3(connection: Connection) -> None:
    """The database as the release before has left it."""
    for statement in ("DROP TABLE warmroute_frames", "DROP TABLE warmroute_responses"):
        connection.execute(text(statement))
    version_4(connection)
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(text(_CREATE.format(bytes=kind)))
    connection.execute(text("UPDATE warmroute_schema SET version = 3"))
    connection.execute(text(_ADD), [row("a"), row("b", "a")])


async def test_a_database_of_version_3_is_migrated_while_its_gateway_writes(url: str) -> None:
    clock = Clock()
    before = Database(url, Tables("state.url", "responses", tables.schema, tables.versions, tables.VERSION))
    await before.open()
    try:
        await before.write(version_3)
        async with opened(url, clock) as store:
            await before.write(lambda connection: connection.execute(text(_ADD), [row("c", "b", root="a", turns=3)]))
            chain = await store.chain("o", "c", 10_000)
            assert [each.id for each in chain] == ["a", "b", "c"]
            assert {each.log for each in chain} == {NO_NAMES}
            expires_at = await store.put_turn(turn("t", "c", head="pl1_t"), b'{"tools": []}')
            await before.write(lambda connection: connection.execute(text(_EMPTY), {"none": b"", "id": "b"}))
            assert [each.id for each in await store.turns_at("o", "pl1_t")] == ["t"]
            assert (await store.get("o", "c")).log == NO_NAMES
            clock.now = expires_at + 1
            assert await store.purge() == 5  # three responses, beside the emptied one, a conversation and a frame
    finally:
        await before.close()
    async with opened(url, clock) as store:  # a second start finds the tables complete
        assert await store.purge() == 0


async def test_a_database_of_version_4_is_migrated_while_its_gateway_writes(url: str) -> None:
    clock = Clock()
    before = Database(url, Tables("state.url", "responses", tables.schema, tables.versions, tables.VERSION))
    await before.open()
    try:
        await before.write(version_5)
        await before.write(version_4)
        async with opened(url, clock) as store:
            later = {"id": "conv_2", "metadata": b'{"a":"b"}'}
            await before.write(lambda connection: connection.execute(text(_CONVERSATION), later))
            await before.write(lambda connection: connection.execute(text(_TURN), {"id": "turn_1", "none": b""}))
            assert (await store.conversation("o", "conv_1")).metadata == b"{}"
            assert (await store.conversation("o", "conv_2")).metadata == b'{"a":"b"}'
            assert [each.id for each in await store.turns_at("o", "pl1_a")] == ["turn_1"]
            token = {
                "owner": "o",
                "token": "t",
                "digest": "d",
                "runner": "r",
                "alive_until": 1.0,
                "turn": "",
                "expires_at": 2.0,
            }
            await store.database.write(lambda connection: connection.execute(insert(once).values(token)))
            found = await before.read(lambda connection: connection.execute(select(once)).one())
            assert dict(found._mapping) == token
            heads = select(tables.conversations.c.head)
            assert await before.read(lambda connection: connection.execute(heads).scalars().all()) == ["", ""]
    finally:
        await before.close()


async def test_a_database_of_version_5_is_migrated_while_its_gateway_writes(url: str) -> None:
    before = Database(url, Tables("state.url", "responses", tables.schema, tables.versions, tables.VERSION))
    await before.open()
    try:
        await before.write(version_5)
        await before.write(lambda connection: connection.execute(text(_TURN), {"id": "turn_1", "none": b""}))
        async with opened(url, Clock()) as store:
            await before.write(lambda connection: connection.execute(text(_TURN), {"id": "turn_2", "none": b""}))
            await store.put_turn(replace(turn("t", head="pl1_a", input_head="pl1_b"), request_id="r-1"))
            found = await store.going_on("o", "pl1_b", [])
            assert sorted(each.request_id for each in found) == ["", "", "r-1"]
            assert {each.head for each in found} == {"pl1_a"}
    finally:
        await before.close()
