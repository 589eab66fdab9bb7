"""Items that are found by their ids alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import func, select

from gateway.features.histories.item_forms import name_at, place_of
from gateway.features.histories.names import locate, read
from gateway.features.histories.purging import TOMBSTONE_S
from gateway.features.histories.records import HistoryTooLargeError, Item, StoredConversation, StoredResponse
from gateway.features.histories.store import HistoryStore
from gateway.features.histories.tables import names
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response

MANY = 1 << 30


def made(id_: str, *ids: str, owner: str = "o") -> StoredResponse:
    """With these items in its output, and one in its input."""
    output = b",".join(b'{"id":"%b","of":"%b"}' % (each.encode(), id_.encode()) for each in ids)
    return replace(response(id_, owner=owner), input=b'{"role":"user"}', output=output, names=ids)


async def counted(store: HistoryStore) -> int:
    query = select(func.count()).select_from(names)
    return (await store._database.read(lambda each: each.execute(query))).scalar_one()


async def test_items_of_responses_and_conversations_are_found_by_their_owner(url: str) -> None:
    async with opened(url) as store:
        await store.put(made("a", "m1", "m2"))
        await store.put(made("b", "m3"))
        item = Item("m4", b'{"id":"m4"}')
        await store.create_conversation(StoredConversation(owner="o", id="c", created_at=1.0, metadata=b"{}"), [item])
        listed = f"msg_{name_at('b', 0, made=False)}"
        found = await store.items_by_id("o", ["m2", "m3", "m4", listed, "never"], MANY)
        assert found == {
            "m2": b'{"id":"m2","of":"a"}',
            "m3": b'{"id":"m3","of":"b"}',
            "m4": b'{"id":"m4"}',
            listed: b'{"role":"user"}',
        }
        assert await store.items_by_id("p", ["m1", "m4", listed], MANY) == {}
        many = [f"n{at}" for at in range(1200)]
        await store.put(made("large", *many))
        assert set(await store.items_by_id("o", many, MANY)) == set(many)


async def test_they_go_with_their_response(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put(made("a", "m1"))
        await store.put(made("b", "m2"))
        await store.put(made("b", "m3"))  # replaced
        assert list(await store.items_by_id("o", ["m1", "m2", "m3"], MANY)) == ["m1", "m3"]
        await store.delete("o", "a")
        assert await store.items_by_id("o", ["m1"], MANY) == {}
        clock.now += TTL_S
        assert await store.items_by_id("o", ["m3"], MANY) == {}
        await store.purge()
        assert await counted(store) == 0
        clock.now += TOMBSTONE_S
        await store.purge()


async def test_an_id_that_is_given_twice_is_that_of_the_last_one(url: str) -> None:
    async with opened(url) as store:
        for id_ in "abc":
            await store.put(made(id_, "msg_0"))
        assert await store.items_by_id("o", ["msg_0"], MANY) == {"msg_0": b'{"id":"msg_0","of":"c"}'}
        assert await counted(store) == 1


async def test_an_id_that_two_owners_have_is_each_ones_own(url: str) -> None:
    async with opened(url) as store:
        for owner, id_ in (("o", "a"), ("p", "b"), ("p", "a"), ("p", "c")):
            await store.put(made(id_, "m1", owner=owner))
        assert await store.items_by_id("o", ["m1"], MANY) == {"m1": b'{"id":"m1","of":"a"}'}
        assert await store.items_by_id("p", ["m1"], MANY) == {"m1": b'{"id":"m1","of":"c"}'}
        for id_ in "cab":
            assert await store.delete("p", id_)
            assert await store.items_by_id("p", ["m1"], MANY) == {}
        assert await store.items_by_id("o", ["m1"], MANY) == {"m1": b'{"id":"m1","of":"a"}'}
        assert await store.delete("o", "a")
        await store.put(made("d", "m1", owner="p"))
        assert await store.items_by_id("o", ["m1"], MANY) == {}


async def test_an_id_never_means_a_response_that_was_deleted_or_replaced(url: str) -> None:
    async with opened(url) as store:
        for id_ in "ab":
            await store.put(made(id_, "m1", "m2"))
        await store.put(made("b", "m2"))  # b has m1 no more
        assert await store.items_by_id("o", ["m1", "m2"], MANY) == {"m2": b'{"id":"m2","of":"b"}'}
        await store.delete("o", "a")
        assert await store.items_by_id("o", ["m2"], MANY) == {"m2": b'{"id":"m2","of":"b"}'}, "it was not a's any more"
        await store.put(made("c", "m2"))
        await store.delete("o", "c")
        assert await store.items_by_id("o", ["m2"], MANY) == {}, "not found, although b has one: the last one counted"
        await store.put(made("c", "m3"))
        assert await store.items_by_id("o", ["m1", "m2"], MANY) == {}, "the same id again is another response"


async def test_an_item_of_a_conversation_outlives_the_response_that_made_it(url: str) -> None:
    """Before and after what has expired is removed."""
    clock = Clock()
    async with opened(url, clock) as store:
        item = Item("m1", b'{"id":"m1","of":"conversation"}')
        await store.create_conversation(StoredConversation(owner="o", id="c", created_at=1.0, metadata=b"{}"), [item])
        await store.put(made("a", "m1"))
        assert await store.items_by_id("o", ["m1"], MANY) == {"m1": b'{"id":"m1","of":"a"}'}
        clock.now += TTL_S / 2
        await store.add("o", "c", [])  # used
        clock.now += TTL_S / 2 + 1
        for _ in range(2):
            assert await store.items_by_id("o", ["m1"], MANY) == {"m1": item.item}
            await store.purge()


async def test_no_more_is_read_than_is_allowed(url: str) -> None:
    async with opened(url) as store:
        await store.put(replace(made("a", "m1"), input=b'"' + b"x" * 1000 + b'"'))
        assert await store.items_by_id("o", ["m1"], 2000)
        with pytest.raises(HistoryTooLargeError):
            await store.items_by_id("o", ["m1"], 1000)


@pytest.mark.parametrize("id_", ["msg_1", "in0_resp", "msg_in_resp", "msg_in12345678_resp", "msg_in0_", "MSG_in0_resp"])
def test_other_ids_name_no_place(id_: str) -> None:
    assert place_of(id_) is None
    assert place_of(f"msg_{name_at('resp_1', 3, made=True)}") == ("resp_1", True, 3)


class Counted:
    """A connection that counts its statements."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.statements = 0

    def execute(self, *arguments: Any) -> Any:
        self.statements += 1
        return self.connection.execute(*arguments)


async def test_a_thousand_unknown_ids_are_a_few_statements(url: str) -> None:
    async with opened(url) as store:

        def work(connection: Any) -> int:
            counted_: Any = Counted(connection)
            ids = [f"never{at}" for at in range(1000)]
            places = locate(counted_, "o", ids, 0.0, MANY)
            assert (places.response_ids, places.size) == ({}, 0)
            assert read(counted_, "o", places, 0.0) == ({}, {})
            return int(counted_.statements)

        assert await store._database.read(work) <= 6


async def test_items_of_conversations_are_bounded_before_they_are_read(url: str) -> None:
    async with opened(url) as store:
        for at in range(3):
            made_ = StoredConversation(owner="o", id=f"c{at}", created_at=1.0, metadata=b"{}")
            await store.create_conversation(made_, [Item("same", b'"%0100d"' % at)])
        with pytest.raises(HistoryTooLargeError):
            await store.items_by_id("o", ["same"], 300)
        assert len(await store.items_by_id("o", ["same"], 400)) == 1
