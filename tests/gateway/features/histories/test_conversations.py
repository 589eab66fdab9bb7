"""Conversations in the store, over a real file."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.features.histories.records import (
    ExpiredObjectError,
    HistoryTooLargeError,
    Item,
    ItemRange,
    StoredConversation,
    UnknownObjectError,
)
from gateway.features.histories.store import HistoryStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response


def some(*ids: str) -> list[Item]:
    return [Item(id_, b'{"id":"%b"}' % id_.encode()) for id_ in ids]


async def begun(store: HistoryStore, id_: str = "c", owner: str = "o", *ids: str) -> None:
    await store.create_conversation(StoredConversation(owner=owner, id=id_, created_at=5.0, metadata=b'{"a":"b"}'), some(*ids))


async def all_items(store: HistoryStore, id_: str = "c") -> list[str]:
    return [each.id for each in (await store.items("o", id_, ItemRange(1000), 1 << 30))[0]]


async def test_its_life(url: str) -> None:
    async with opened(url) as store:
        await begun(store, "c", "o", "i1", "i2")
        assert (await store.conversation("o", "c")).metadata == b'{"a":"b"}'
        await store.set_metadata("o", "c", b'{"x":"y"}')
        assert (await store.conversation("o", "c")).metadata == b'{"x":"y"}'
        await store.add("o", "c", some("i3"))
        await store.put(response("r", conversation="c"), some("i4", "i5"))
        assert await all_items(store) == ["i1", "i2", "i3", "i4", "i5"]
        assert await store.item("o", "c", "i3") == some("i3")[0]
        await store.delete_item("o", "c", "i3")
        assert await store.conversation_input("o", "c", 1000) == [each.item for each in some("i1", "i2", "i4", "i5")]
        assert await store.delete_conversation("o", "c")
        assert not await store.delete_conversation("o", "c")
        assert await store.get("o", "r"), "its responses stay"


async def test_a_write_whose_confirmation_was_lost_adds_its_items_once(url: str) -> None:
    async with opened(url) as store:
        await begun(store)
        driver = store._database._opened()
        write, lost = driver.write, []

        async def confirms_late(works: Any) -> Any:
            results = await write(works)
            if not lost:
                lost.append(len(works))
                raise OSError("the connection was lost")
            return results

        driver.write = confirms_late  # type: ignore[method-assign]
        await asyncio.gather(
            store.add("o", "c", some("i1", "i2")),
            store.put(response("r", conversation="c"), some("i3", "i4")),
            store.add("o", "c", some("i5")),
        )
        assert lost == [3], "all three were in the transaction that was done again"
        assert await all_items(store) == ["i1", "i2", "i3", "i4", "i5"]
        await store.add("o", "c", some("i5"))
        assert await all_items(store) == ["i1", "i2", "i3", "i4", "i5", "i5"], "that is another write"


async def test_a_write_that_was_undone_for_anothers_sake_is_done_again(url: str) -> None:
    """Although the same items are there already: engines and clients may give ids twice."""
    async with opened(url) as store:
        await begun(store)
        for count in range(1, 4):
            added, refused = await asyncio.gather(
                store.add("o", "c", some("i")), store.delete_item("o", "c", "never"), return_exceptions=True
            )
            assert (added, type(refused)) == (None, UnknownObjectError)
            assert await all_items(store) == ["i"] * count


async def test_it_is_its_owners(url: str) -> None:
    async with opened(url) as store:
        await begun(store, "c", "o", "i1")
        for work in (
            store.conversation("p", "c"),
            store.set_metadata("p", "c", b"{}"),
            store.add("p", "c", some("x")),
            store.items("p", "c", ItemRange(5), 1 << 30),
            store.item("p", "c", "i1"),
            store.item("o", "c", "never"),
            store.items("o", "c", ItemRange(5, "never"), 1 << 30),
            store.delete_item("p", "c", "i1"),
            store.delete_item("o", "c", "never"),
            store.conversation_input("p", "c", 1000),
            store.put(response("r", owner="p", conversation="c"), some("x")),
        ):
            with pytest.raises(UnknownObjectError):
                await work
        assert not await store.delete_conversation("p", "c")
        with pytest.raises(UnknownObjectError):
            await store.get("p", "r")
        assert await all_items(store) == ["i1"]


async def test_it_expires_after_its_last_use(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await begun(store, "c", "o", "i1")
        clock.now += TTL_S * 0.9
        await store.add("o", "c", some("i2"))
        clock.now += TTL_S * 0.9
        assert await all_items(store) == ["i1", "i2"]
        clock.now += TTL_S * 0.2
        for work in (store.conversation("o", "c"), store.add("o", "c", some("x")), store.conversation_input("o", "c", 1000)):
            with pytest.raises(ExpiredObjectError):
                await work
        assert await store.purge() == 1
        with pytest.raises(ExpiredObjectError):
            await store.items("o", "c", ItemRange(5), 1 << 30)


async def test_a_large_one_is_not_read(url: str) -> None:
    async with opened(url) as store:
        await begun(store, "c", "o", *(f"i{at}" for at in range(100)))
        with pytest.raises(HistoryTooLargeError):
            await store.conversation_input("o", "c", 500)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 12), st.integers(1, 5), st.booleans())
def test_pages_have_all_items_once(url: str, count: int, limit: int, descending: bool) -> None:
    async def run() -> None:
        async with opened(url, empty=True) as store:
            ids = [f"i{at}" for at in range(count)]
            await begun(store, "c", "o", *ids)
            seen, after, more = list[str](), "", True
            while more:
                page: tuple[list[Any], bool] = await store.items(
                    "o", "c", ItemRange(limit, after, descending=descending), 1 << 30
                )
                found, more = page
                assert len(found) <= limit
                seen += [each.id for each in found]
                after = seen[-1] if seen else ""
            assert seen == (ids[::-1] if descending else ids)

    asyncio.run(run())


async def test_many_at_once_keep_their_order_within(url: str) -> None:
    async with opened(url) as store:
        await begun(store)
        await asyncio.gather(*(store.add("o", "c", some(f"{at}a", f"{at}b")) for at in range(50)))
        seen = await all_items(store)
        assert len(set(seen)) == 100
        assert all(seen[at][:-1] == seen[at + 1][:-1] for at in range(0, 100, 2))
