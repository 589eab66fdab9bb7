"""The bytes of what is stored are bounded, by owner and in all, and known whatever is added, replaced, deleted or expires."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from sqlalchemy import Connection, delete, func, select, update

from gateway.database.database import Database
from gateway.features.histories.records import Item, RunEnd, StoredConversation, StoreFullError
from gateway.features.histories.sizes import OWNER_SHARE, StoredSizes
from gateway.features.histories.tables import CONTENTS, ROW, TABLES, sizes, versions
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response


def conversation(id_: str, owner: str = "o") -> StoredConversation:
    return StoredConversation(owner=owner, id=id_, created_at=1.0, metadata=b"{}")


def counted(connection: Connection) -> dict[str, int]:
    return {row.owner: row.size for row in connection.execute(select(sizes)).all() if row.size}


def stored(connection: Connection) -> dict[str, int]:
    """The oracle: the sum over all rows."""
    found = dict[str, int]()
    for table, size in CONTENTS.items():
        sums = select(table.c.owner, func.sum(size), func.count()).group_by(table.c.owner)
        for owner, bytes_, rows in connection.execute(sums).all():
            found[owner] = found.get(owner, 0) + bytes_ + ROW * rows
    return found


async def agrees(store: RunStore) -> None:
    seen, wanted = await store._database.read(lambda connection: (counted(connection), stored(connection)))
    assert seen == wanted


async def test_any_history_has_the_size_that_is_counted(url: str) -> None:
    chance, clock = random.Random(5), Clock()
    async with opened(url, clock, empty=True) as store:
        for number in range(120):
            owner, id_ = chance.choice("ab"), f"{chance.randrange(9)}"
            kind = chance.randrange(9)
            if kind < 3:
                made = response(id_, parent=chance.choice(["", "1"]), owner=owner, size=chance.randrange(500))
                await store.put(replace(made, created_at=float(number)))
            elif kind == 3:
                await store.delete(owner, id_)
            elif kind == 4:
                made = replace(response(f"run{number}", owner=owner, size=90), status="queued", output=b"", response=b"{}")
                await store.begin(made, "r")
                await store.finish(owner, made.id, RunEnd("completed", b"x" * 70, b'{"a": 1}'))
            elif kind < 7:
                await store.create_conversation(conversation(f"c{number}", owner), [Item("i", b"x" * 50), Item("j", b"{}")])
                await store.add(owner, f"c{number}", [Item("k", b"y" * 30)])
                await store.delete_item(owner, f"c{number}", "j")
                await store.set_metadata(owner, f"c{number}", b'{"a": "b"}')
            elif kind == 7:
                await store.delete_conversation(owner, f"c{number - 1}")
            else:
                clock.now += chance.choice([1.0, TTL_S + 1, 8 * 86_400.0])
                await store.purge()
            await agrees(store)
        clock.now += TTL_S + 1
        while await store.purge():
            await agrees(store)
        clock.now += 8 * 86_400.0
        while await store.purge():
            await agrees(store)
        assert await store._database.read(counted) == {}


async def bounded(url: str, max_bytes: int) -> RunStore:
    database = Database(url, TABLES)
    await database.open()
    return RunStore(database, TTL_S, Clock(), ResponseRuns(), StoredSizes(max_bytes))


async def test_an_owner_has_a_share_of_the_bytes(url: str) -> None:
    store = await bounded(url, 40_000)
    share = 40_000 // OWNER_SHARE
    try:
        with pytest.raises(StoreFullError) as refused:
            await store.create_conversation(conversation("c"), [Item("i", b"x" * share)])
        assert refused.value.of_owner
        await store.create_conversation(conversation("c"), [Item("i", b"x" * (share // 2))])
        with pytest.raises(StoreFullError):
            await store.add("o", "c", [Item("j", b"x" * (share // 2))])
        with pytest.raises(StoreFullError):
            await store.put(response("r", size=share // 2))
        await agrees(store)
        await store.put(response("r", owner="other", size=share // 2))
        await store.delete_conversation("o", "c")
        await store.put(response("r", size=share // 2))
        await agrees(store)
    finally:
        await store.close()


async def test_all_owners_together_have_a_maximum(url: str) -> None:
    store = await bounded(url, 40_000)
    try:
        kept = 0
        with contextlib.suppress(StoreFullError):
            for number in range(50):
                await store.put(response("r", owner=f"o{number}", size=2000))
                kept += 1
        assert 0 < kept < 20
        with pytest.raises(StoreFullError) as refused:
            await store.put(response("r", owner="o98", size=2000))
        assert not refused.value.of_owner
        assert 37_000 < sum((await store._database.read(counted)).values()) <= 40_000
        await store.delete("o1", "r")
        await store.put(response("r", owner="o99", size=1000))
    finally:
        await store.close()


async def test_tables_without_sizes_are_counted_when_they_are_migrated(url: str) -> None:
    async with opened(url) as store:
        await store.put(response("r", owner="a", size=700))
        await store.create_conversation(conversation("c", "b"), [Item("i", b"x" * 50)])

        def back(connection: Connection) -> None:
            connection.execute(delete(sizes))
            connection.execute(update(versions).values(version=2))

        await store._database.write(back)
    async with opened(url) as store:
        assert len(await store._database.read(counted)) == 2
        await agrees(store)
