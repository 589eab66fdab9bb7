"""Turns of prompt logs in the store: found by their heads, renewed, expired; their frames."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from gateway.database.database import Database
from gateway.features.histories.records import (
    ExpiredObjectError,
    FoundTurn,
    RefMove,
    StoredResponse,
    StoreFullError,
    TurnNames,
    UnknownObjectError,
)
from gateway.features.histories.tables import TABLES
from gateway.features.histories.turns import MAX_FOUND
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, file_url, opened, response
from tests.gateway.features.histories.test_sizes import agrees, bounded

FRAME = b'{"tools": [1]}'


def turn(
    id_: str, parent: str = "", *, head: str, input_head: str = "", after_input: bool = False, form: str = "chat"
) -> StoredResponse:
    names = TurnNames(
        head=head,
        input_head=input_head or f"{head}.in",
        form=form,
        frame="pf1_a",
        after_input=after_input,
        digests=b"d" * 64,
        open=b'[["in"],["out"]]',
    )
    return replace(response(id_, parent), log=names)


async def test_a_turn_is_found_by_its_heads_and_by_its_owner_only(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_1", head="a"))
        clock.now += 1
        await store.put_turn(replace(turn("turn_2", "turn_1", head="b", input_head="a"), created_at=clock.now))
        newest = FoundTurn("turn_2", "chat", at_input=True, open=b'["in"]')
        other = FoundTurn("turn_1", "chat", at_input=False, open=b'["out"]')
        assert await store.turns_at("o", "a") == [newest, other]
        for owner, head in [("o", "other"), ("p", "a"), ("o", ""), ("p", "")]:
            with pytest.raises(UnknownObjectError) as unknown:
                await store.turns_at(owner, head)
            assert unknown.value.id == ""


async def test_a_turn_after_an_input_leaves_the_answer_out(url: str) -> None:
    async with opened(url) as store:
        await store.put_turn(turn("turn_1", head="a"))
        await store.put_turn(turn("turn_2", "turn_1", head="b", after_input=True))
        await store.put_turn(turn("turn_3", "turn_2", head="c"))
        first, second, third = await store.chain("o", "turn_3", 10_000)
        assert (first.output, second.output, third.output) == (b"", response("turn_2").output, response("turn_3").output)
        assert [each.log.head for each in (first, second, third)] == ["a", "b", "c"]
        size = sum(len(each.input) + len(each.output) for each in (first, second, third))
        assert await store.chain("o", "turn_3", size + 6)


async def test_the_same_turn_again_is_renewed(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        first = await store.put_turn(turn("turn_1", head="a"), FRAME)
        assert first == clock.now + TTL_S
        await store.put_turn(turn("turn_2", "turn_1", head="b"), FRAME)
        clock.now += TTL_S / 2
        again = replace(turn("turn_1", head="a"), created_at=77.0)
        assert await store.put_turn(again, FRAME) == clock.now + TTL_S
        assert (await store.get("o", "turn_1")).created_at == 5.0
        clock.now = first + 1
        assert await store.turns_at("o", "b"), "the tree is renewed as a whole"
        assert await store.frame("o", "pf1_a", "chat") == FRAME
        await agrees(store)


async def test_an_expired_turn_that_comes_again_renews_its_whole_tree(url: str) -> None:
    """Before it is emptied: else its root would live, and what goes on from it would come back with a later renewal."""
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_1", head="a"), FRAME)
        first = await store.put_turn(turn("turn_2", "turn_1", head="b"), FRAME)
        clock.now = first + 1
        for head in ("a", "b"):
            with pytest.raises(ExpiredObjectError):
                await store.turns_at("o", head)
        assert await store.put_turn(replace(turn("turn_1", head="a"), created_at=77.0), FRAME) == clock.now + TTL_S
        for head in ("a", "b"):
            assert (await store.turns_at("o", head))[0].expires_at == clock.now + TTL_S
        assert await store.frame("o", "pf1_a", "chat") == FRAME
        await agrees(store)


async def test_a_turn_of_a_large_tree_renews_the_turns_before_it_only(url: str) -> None:
    """One tree must not take the time of all writers. Nothing is thrown out before its time, and no turn outlives its base."""
    clock = Clock()
    async with opened(url, clock) as store:
        store.max_renewed = 4
        for id_, parent in [("turn_1", ""), ("turn_2", "turn_1"), ("turn_3", "turn_2"), ("turn_4", "turn_1")]:
            first = await store.put_turn(turn(id_, parent, head=id_))
        other = turn("turn_5", "turn_4", head="turn_5")
        await store.put_turn(replace(other, log=replace(other.log, frame="pf1_b")), b'{"tools": [2]}')
        clock.now += TTL_S / 2
        second = await store.put_turn(turn("turn_6", "turn_2", head="turn_6"), FRAME)
        expiries = {id_: (await store.turns_at("o", id_))[0].expires_at for id_ in (f"turn_{number}" for number in range(1, 7))}
        renewed = {"turn_1", "turn_2", "turn_6"}
        assert expiries == {id_: second if id_ in renewed else first for id_ in expiries}
        assert await store.put_turn(turn("turn_7", "turn_3", head="turn_7"), ttl_s=TTL_S * 0.6) == second - TTL_S * 0.4
        assert (await store.turns_at("o", "turn_1"))[0].expires_at == second, "it does not become shorter"
        clock.now = second - TTL_S * 0.4 - 1
        assert len(await store.chain("o", "turn_7", 10_000)) == 4
        assert len(await store.chain("o", "turn_6", 10_000)) == 3
        with pytest.raises(ExpiredObjectError):
            await store.turns_at("o", "turn_5")
        with pytest.raises(UnknownObjectError):
            await store.frame("o", "pf1_b", "chat")
        assert await store.frame("o", "pf1_a", "chat") == FRAME
        while await store.purge():
            pass
        assert len(await store.chain("o", "turn_7", 10_000)) == 4
        await agrees(store)


async def test_a_turn_may_live_shorter(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        assert await store.put_turn(turn("turn_1", head="a"), FRAME, ttl_s=5) == clock.now + 5
        second, third = turn("turn_2", head="b", form="messages"), turn("turn_3", "turn_2", head="c", form="messages")
        await store.put_turn(second)
        assert await store.put_turn(third, ttl_s=5) == clock.now + TTL_S, "its tree lives longer"
        clock.now += 6
        for _ in range(2):
            with pytest.raises(ExpiredObjectError) as expired:
                await store.turns_at("o", "a")
            assert expired.value.at == clock.now - 1
            await store.purge()
        with pytest.raises(UnknownObjectError):
            await store.frame("o", "pf1_a", "chat")
        await agrees(store)
        clock.now += 8 * 86_400
        while await store.purge():
            pass
        with pytest.raises(UnknownObjectError):
            await store.turns_at("o", "a")
        await agrees(store)


async def test_a_turn_without_its_parent_is_not_stored(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_1", head="a"))
        await store.delete("o", "turn_1")
        with pytest.raises(UnknownObjectError):
            await store.put_turn(turn("turn_2", "turn_1", head="b"))
        await store.put_turn(turn("turn_1", head="a"))
        clock.now += TTL_S + 1
        with pytest.raises(UnknownObjectError):
            await store.put_turn(turn("turn_2", "turn_1", head="b"))
        await store.put_turn(turn("turn_1", head="a"))
        assert await store.turns_at("o", "a")
        await store.put(response("resp_1"))
        with pytest.raises(UnknownObjectError):
            await store.put_turn(replace(turn("resp_1", head="x", form="responses"), created_at=6.0))
        await agrees(store)


async def test_turns_and_frames_count_for_their_owner(url: str) -> None:
    store = await bounded(url, 16_000)
    try:
        with pytest.raises(StoreFullError):
            await store.put_turn(turn("turn_1", head="a"), b'"' + b"x" * 4000 + b'"')
        await agrees(store)
        await store.put_turn(turn("turn_1", head="a"), FRAME)
        await agrees(store)
    finally:
        await store.close()


async def test_what_goes_on_from_a_head_and_its_deletion(url: str) -> None:
    async with opened(url) as store:
        await store.put_turn(turn("turn_1", head="a", input_head="i"))
        await store.put_turn(turn("turn_2", "turn_1", head="b"))
        await store.put_turn(turn("turn_3", "turn_1", head="c", after_input=True))
        for head, expected in (("a", ["b"]), ("i", ["a", "c"]), ("c", [])):
            found = await store.going_on("o", head, await store.turns_at("o", head))
            assert sorted(each.head for each in found) == expected
        assert await store.delete_turns("p", "a", tree=True) == 0
        assert await store.delete_turns("o", "b", tree=False) == 1
        assert await store.delete_turns("o", "c", tree=True) == 2
        await agrees(store)


async def test_the_newest_turns_after_a_head_are_found_among_many_after_its_input(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put_turn(turn("turn_0", head="a", input_head="i"))
        for number in range(MAX_FOUND + 2):
            await store.put_turn(replace(turn(f"turn_{number + 1}", "turn_0", head=f"b{number}"), created_at=10.0 + number))
        for number in range(2 * MAX_FOUND):  # newer ones
            forked = turn(f"fork_{number}", "turn_0", head=f"c{number}", after_input=True)
            await store.put_turn(replace(forked, created_at=1_000.0 + number))
        found = await store.going_on("o", "a", await store.turns_at("o", "a"))
        assert [each.head for each in found] == [f"b{number}" for number in range(MAX_FOUND + 1, 1, -1)]
        found = await store.going_on("o", "i", await store.turns_at("o", "i"))
        assert [each.head for each in found] == [f"c{number}" for number in range(2 * MAX_FOUND - 1, MAX_FOUND - 1, -1)]


class CountingDatabase(Database):
    """Counts its transactions that write."""

    writes = 0

    async def write(self, work: Any) -> Any:
        self.writes += 1
        return await super().write(work)


async def test_a_large_tree_is_deleted_in_steps(url: str) -> None:
    database = CountingDatabase(url, TABLES)
    await database.open()
    store = RunStore(database, TTL_S, Clock(), ResponseRuns())
    store.deleted_at_once = 2
    await store.put_turn(turn("turn_0", head="a"))
    for number in range(1, 6):
        await store.put_turn(turn(f"turn_{number}", f"turn_{number - 1}", head=f"b{number}"))
    before = database.writes
    assert await store.delete_turns("o", "a", tree=True) == 6
    assert database.writes - before == 4  # 2, 2, 1 and the named turn
    await agrees(store)
    await store.close()


async def test_turns_with_an_empty_frame_are_deleted_without_a_search_for_others(tmp_path: Path) -> None:
    """Nearly all turns of an owner may have it, and no frame is stored for it."""
    searches = list[str]()

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if re.search(r"warmroute_responses\.frame =", statement):
            searches.append(statement)

    async with opened(file_url(tmp_path / "a.sqlite")) as store:
        await store.put_turn(turn("turn_1", head="a"), FRAME)
        empty = turn("turn_2", head="b")
        await store.put_turn(replace(empty, log=replace(empty.log, frame="pf1_empty")))
        event.listen(Engine, "before_cursor_execute", note)
        try:
            assert await store.delete_turns("o", "b", tree=False) == 1
            assert searches == []
            assert await store.delete_turns("o", "a", tree=False) == 1
            assert len(searches) == 1
        finally:
            event.remove(Engine, "before_cursor_execute", note)


async def test_no_statement_reads_all_turns_of_an_owner(tmp_path: Path) -> None:
    """An owner may have a million. A text in the condition of an index of few rows is no parameter: SQLite would prepare the
    statement at each execution.
    """
    statements = list[tuple[str, Any]]()

    def note(_connection: Any, _cursor: Any, statement: str, values: Any, *_more: Any) -> None:
        statements.append((statement, values))

    path = tmp_path / "a.sqlite"
    async with opened(file_url(path)) as store:
        event.listen(Engine, "before_cursor_execute", note)
        try:
            await store.put_turn(turn("turn_1", head="a"), FRAME, 10.0, RefMove("main", [""]))
            await store.put_turn(turn("turn_2", "turn_1", head="b"), ttl_s=10.0)
            await store.chain("o", "turn_2", 10_000)
            await store.outline("o", "turn_2", 10_000)
            await store.going_on("o", "a", await store.turns_at("o", "a"))
            await store.issuers_at("o", ["a", "b"])
            await store.turn_with_id("o", "turn_1")
            await store.frame("o", "pf1_a", "chat")
            await store.name_responses("o", {"turn_1": turn("turn_1", head="a").log})
            await store.set_ref("o", "main", "b", (await store.ref("o", "main")).head)
            await store.delete_turns("o", "b", tree=True)
        finally:
            event.remove(Engine, "before_cursor_execute", note)
    with contextlib.closing(sqlite3.connect(path)) as file:
        asked = [each for each in statements if each[0].startswith(("SELECT", "WITH", "UPDATE", "DELETE"))]
        steps = [row[3] for each in asked for row in file.execute(f"explain query plan {each[0]}", each[1])]
    assert len(asked) > 15
    assert [step for step in steps if re.search(r"SCAN warmroute|warmroute_(responses|names)\b.*\(owner=\?\)$", step)] == []
    assert [each for each in asked if re.search(r"\.(head|input_head|frame) != \?", each[0]) and "" in each[1]] == []
