"""Refs in the store: moved by compare-and-set, with a turn or alone, by two processes, until they expire."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import insert

from gateway.features.histories.records import RefMove, RefMovedError, StoreFullError, TooManyRefsError, UnknownObjectError
from gateway.features.histories.refs import MAX_REFS
from gateway.features.histories.tables import conversations
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened
from tests.gateway.features.histories.test_sizes import agrees, bounded
from tests.gateway.features.histories.test_turns import turn


async def test_a_ref_is_made_moved_and_deleted_by_its_owner(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_1", head="a", input_head="i"))
        with pytest.raises(UnknownObjectError) as unknown:
            await store.set_ref("o", "main", "x", "")
        assert unknown.value.id == "", "no turn has the head"
        with pytest.raises(RefMovedError) as moved:
            await store.set_ref("o", "main", "a", "b")
        assert moved.value.head == ""
        made = await store.set_ref("o", "main", "a", "")
        assert (made.head, made.expires_at) == ("a", clock.now + TTL_S)
        assert await store.ref("o", "main") == made
        assert await store.set_ref("o", "main", "a", "") == made, "the same again"
        with pytest.raises(RefMovedError) as moved:
            await store.set_ref("o", "main", "i", "")
        assert moved.value.head == "a"
        assert (await store.set_ref("o", "main", "i", "a")).head == "i"
        for owner, name in (("p", "main"), ("o", "other")):
            with pytest.raises(UnknownObjectError):
                await store.ref(owner, name)
            with pytest.raises(UnknownObjectError):
                await store.delete_ref(owner, name)
        with pytest.raises(UnknownObjectError):
            await store.conversation("o", "ref:main")
        with pytest.raises(RefMovedError):
            await store.delete_ref("o", "main", "a")
        await agrees(store)
        await store.delete_ref("o", "main", "i")
        with pytest.raises(UnknownObjectError):
            await store.ref("o", "main")
        await agrees(store)


async def test_a_ref_moves_with_a_turn(url: str) -> None:
    async with opened(url) as store:
        moves = [RefMove("main", bases) for bases in ([], ["a"], ["a"], ["a"])]
        await store.put_turn(turn("turn_1", head="a"), move=moves[0])
        await store.put_turn(turn("turn_2", "turn_1", head="b"), move=moves[1])
        await store.put_turn(turn("turn_3", "turn_1", head="c"), move=moves[2])
        assert [move.moved for move in moves] == [True, True, False, False]
        assert (await store.ref("o", "main")).head == "b"
        await store.put_turn(turn("turn_2", "turn_1", head="b"), move=moves[3])
        assert moves[3].moved, "the same turn again"
        assert [each.id for each in await store.turns_at("o", "c")] == ["turn_3"], "a fork is kept"


async def test_an_expired_ref_is_gone_and_its_name_is_free(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_1", head="a"))
        await store.set_ref("o", "main", "a", "")
        clock.now += TTL_S / 2
        await store.set_ref("o", "other", "a", "")
        await store.put_turn(turn("turn_1", head="a"))
        clock.now += TTL_S / 2
        with pytest.raises(UnknownObjectError):
            await store.ref("o", "main")
        assert await store.purge() == 1
        await agrees(store)
        assert (await store.ref("o", "other")).head == "a"
        assert (await store.set_ref("o", "main", "a", "")).head == "a"
        clock.now += TTL_S
        assert await store.purge() == 3, "a turn, two refs"
        await agrees(store)


async def test_an_owner_has_a_thousand_refs(url: str) -> None:
    rows = [
        {"owner": "o", "id": f"ref:{at}", "head": "a", "created_at": 0.0, "expires_at": 2e6, "emptied": 0, "metadata": b""}
        for at in range(MAX_REFS - 1)
    ]
    async with opened(url) as store:
        await store.put_turn(turn("turn_1", head="a"))
        await store.database.write(lambda connection: connection.execute(insert(conversations), rows))
        await store.set_ref("o", "last", "a", "")
        with pytest.raises(TooManyRefsError):
            await store.set_ref("o", "more", "a", "")
        move = RefMove("more", [])
        await store.put_turn(turn("turn_2", "turn_1", head="b"), move=move)
        assert not move.moved
        assert await store.turns_at("o", "b"), "the turn is kept"
        await store.delete_ref("o", "7")
        await store.set_ref("o", "more", "a", "")


async def test_a_ref_counts_for_the_maximum(url: str) -> None:
    store = await bounded(url, 4096)
    try:
        await store.put_turn(turn("turn_1", head="a"))
        await store.set_ref("o", "one", "a", "")
        await store.set_ref("o", "two", "a", "")
        with pytest.raises(StoreFullError):
            await store.set_ref("o", "three", "a", "")
        await agrees(store)
    finally:
        await store.close()


async def test_of_two_writers_one_moves_a_ref(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        await one.put_turn(turn("turn_1", head="a"), move=RefMove("main", []))
        for at in range(5):
            base = (await one.ref("o", "main")).head
            moves = [RefMove("main", [base]), RefMove("main", [base])]
            puts = [
                store.put_turn(turn(f"turn_{at}_{side}", "turn_1", head=f"{side}{at}"), move=move)
                for side, (store, move) in enumerate(zip((one, other), moves, strict=True))
            ]
            await asyncio.gather(*puts)
            assert sorted(move.moved for move in moves) == [False, True]
            winner = moves.index(next(move for move in moves if move.moved))
            assert (await other.ref("o", "main")).head == f"{winner}{at}"
            for side in (0, 1):
                assert await one.turns_at("o", f"{side}{at}"), "both turns are kept"
