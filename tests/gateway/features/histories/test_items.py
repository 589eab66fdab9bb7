"""Items of what the gateway keeps: where they are read, and that it is the same everywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest

from gateway.errors import GatewayError
from gateway.features.histories.items import StoredItems
from gateway.parser.parsing import Parsing
from gateway.parser.process import ParserProcess

ITEM = b'{"id":"a","content":"%b"}'
SHORT = {"few bytes": ITEM % (b"[" * 20_000), "few values": ITEM % (b"x" * 500_000)}
LONG = {"many values": b'{"id":"a","content":[%b0]}' % (b"0," * 20_000), "many bytes": ITEM % (b"x" * 600_000)}


@contextlib.asynccontextmanager
async def reader() -> AsyncIterator[tuple[StoredItems, ParserProcess]]:
    process = ParserProcess()
    try:
        yield StoredItems(Parsing(process, 256, 64)), process
    finally:
        await process.close()


@pytest.mark.parametrize("shape", [*SHORT, *LONG])
async def test_what_is_long_is_read_by_the_process(shape: str) -> None:
    async with reader() as (items, process):
        item = (SHORT | LONG)[shape]
        joined = item + b',{"n":1}'
        assert await items.picked(joined, {"a"}, {"x": 1}, "client") == {"a": item, "x": b'{"n":1}'}
        found = await items.listed(joined, 2, "client")
        assert found
        (id_, first), (_, second) = found
        assert (id_, orjson.loads(first)["status"], orjson.loads(second)["n"]) == ("a", "completed", 1)
        assert await items.listed(joined, 1, "client") is None
        turns = [("r", b'{"n":0}', b'{"id":"b"}'), ("s", joined, item)]
        page = orjson.loads(await items.input_items(turns, {"order": "asc"}, "client"))
        assert [each["id"] for each in page["data"]] == ["msg_in0_r", "b", "a", "msg_in1_s"], "the last answer is no input"
        assert process.started == (shape in LONG)


Work = Callable[[StoredItems, bytes], Awaitable[Any]]
WORKS: dict[str, Work] = {
    "picked": lambda items, raw: items.picked(raw, {"a"}, {}, ""),
    "listed": lambda items, raw: items.listed(raw, 1, ""),
    "input items": lambda items, raw: items.input_items([("r", raw, b"")], {}, ""),
}


@pytest.mark.parametrize("work", WORKS)
async def test_the_loop_turns_while_what_is_long_is_read(work: str) -> None:
    """No time is asserted, only that other tasks had their turns."""
    async with reader() as (items, _):
        task, turns = asyncio.ensure_future(WORKS[work](items, ITEM % (b"x" * 30_000_000))), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert await task
        assert turns > 100


@pytest.mark.parametrize("size", [10, 600_000])
async def test_a_page_after_nothing_and_one_that_cannot_be_written_are_the_clients_errors(size: int) -> None:
    async with reader() as (items, _):
        filler = ITEM % (b"x" * size)
        with pytest.raises(GatewayError) as caught:
            await items.input_items([("r", filler, b"")], {"after": "b"}, "")
        assert (caught.value.status, caught.value.param) == (400, "after")
        deep = filler + b',{"id":"b","x":%b}' % (b"[" * 300 + b"]" * 300)
        with pytest.raises(GatewayError) as caught:
            await items.input_items([("r", deep, b"")], {}, "")
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")
        assert await items.listed(deep, 5, "") is None
