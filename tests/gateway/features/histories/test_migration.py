"""A database of version 3 gets the columns of prompt logs, with its data, while a gateway of that release writes to it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, text

from gateway.database.database import Database
from gateway.database.tables import Tables
from gateway.features.histories import tables
from gateway.features.histories.records import NO_NAMES
from tests.gateway.features.histories.conftest import Clock, opened, response
from tests.gateway.features.histories.test_turns import turn

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


def version_3(connection: Connection) -> None:
    """The database as the release before has left it."""
    for statement in ("DROP TABLE warmroute_frames", "DROP TABLE warmroute_responses"):
        connection.execute(text(statement))
    kind = "BLOB" if connection.dialect.name == "sqlite" else "BYTEA"
    connection.execute(text(_CREATE.format(bytes=kind)))
    connection.execute(text("UPDATE warmroute_schema SET version = 3"))
    connection.execute(text(_ADD), [row("a"), row("b", "a")])


async def test_a_database_of_the_version_before_is_migrated_while_its_gateway_writes(url: str) -> None:
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
            assert await store.purge() == 4  # three responses, beside the emptied one, and a frame
    finally:
        await before.close()
    async with opened(url, clock) as store:  # a second start finds the tables complete
        assert await store.purge() == 0
