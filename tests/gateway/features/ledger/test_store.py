"""The ledger's database: each record is in the rows and in the sums exactly once, whatever is repeated and whatever breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from gateway.accounting.meter import Bill
from gateway.accounting.money import MOST
from gateway.database.database import Database
from gateway.database.failures import StoreFailed
from gateway.features.ledger.batches import LedgerBatch, Row, sums_of
from gateway.features.ledger.ledger import MAX_BATCH
from gateway.features.ledger.store import ROWS_PER_PURGE, InvalidValueError, LedgerStore, open_ledger_store, put
from gateway.features.ledger.sums import MILL, MONEY
from gateway.features.ledger.tables import daily, rows
from tests.gateway.features.histories.conftest import pausing
from tests.gateway.features.ledger.conftest import (
    DAY_S,
    NOON,
    Entries,
    all_rows,
    all_sums,
    file_url,
    maker,
    record,
    stored,
)
from tests.support.machines import share_of
from tests.support.postgres import Postgres

HOSTILE = ["<b>x</b>", "a\0b", "\ud800", "x" * 5000, "'; DROP TABLE warmroute_usage; --", "\x1b[2J", "%s $1 ? :x", "日本"]


async def check(database: Database) -> list[dict[str, Any]]:
    """The sums are those of the rows. Returns the rows."""
    found, sums = await database.read(all_rows), await database.read(all_sums)
    expected = sums_of([tuple(row.values()) for row in found])
    assert [amounts(tuple(each.values())) for each in sums] == [amounts(each) for each in expected]
    return found


def amounts(sums: tuple[Any, ...]) -> tuple[Any, ...]:
    """With each sum of money as one number."""
    money = sums[-2 * len(MONEY) :]
    return (*sums[: -len(money)], *(MILL * mills + pico for mills, pico in zip(money[::2], money[1::2], strict=True)))


async def test_what_is_written_is_there(url: str) -> None:
    entries = Entries()
    batch = maker().batch(entries.of(record(), record(id="r-2", tenant="u", bill=None)), NOON)
    async with stored(url) as (store, database):
        await store.write(batch)
        found = await check(database)
        assert [tuple(row.values()) for row in found] == batch.rows()
        assert [each["tenant"] for each in await database.read(all_sums)] == ["t", "u"]
        assert [each["unpriced"] for each in await database.read(all_sums)] == [0, 1]


async def test_hostile_names_are_stored(url: str) -> None:
    records = [record(tenant=name, model=name, alias=name, label=name, pool=name, error=name, key=name) for name in HOSTILE]
    async with stored(url) as (store, database):
        await store.write(maker().batch(Entries().of(*records), NOON))
        assert len(await check(database)) == len(HOSTILE)


async def test_absurd_amounts_add_up_exactly(url: str) -> None:
    bills = [Bill(MOST, MOST, MOST, -MOST, MOST, MOST), Bill(MOST - 1, 1, 0, MOST - 3)] * 100
    async with stored(url) as (store, database):
        for _ in range(3):
            await store.write(maker(random.getrandbits(60)).batch(Entries().of(*(record(bill=bill) for bill in bills)), NOON))
        await check(database)
        (sums,) = await database.read(all_sums)
        assert sums["input_mills"] * 10**9 + sums["input_pico"] == 300 * (MOST + MOST - 1)
        assert sums["saved_mills"] * 10**9 + sums["saved_pico"] == -300 * 3


async def test_a_batch_that_is_written_again_adds_nothing(url: str) -> None:
    batch = maker().batch(Entries().of(*(record() for _ in range(MAX_BATCH))), NOON)
    async with stored(url) as (store, database):
        for _ in range(3):
            await store.write(batch)
        assert len(await check(database)) == MAX_BATCH
    async with stored(url) as (store, database):
        await store.write(batch)
        assert len(await check(database)) == MAX_BATCH


async def test_a_batch_of_which_a_part_is_there_adds_the_rest(url: str) -> None:
    batch = maker().batch(Entries().of(*(record(tenant=f"t{at % 3}") for at in range(9))), NOON)
    async with stored(url) as (store, database):
        await store.write(batch.halves()[0])
        await store.write(batch)
        await store.write(batch.halves()[1])
        assert len(await check(database)) == 9


async def test_gateways_that_write_at_once_lose_and_double_nothing(url: str) -> None:
    """All of them add to the same sums, in different orders."""
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(stored(url)) for _ in range(4)]

        async def writes(seed: int, store: LedgerStore) -> None:
            chance, one = random.Random(seed), maker(seed)
            for _ in range(15):
                some = [record(tenant=chance.choice("abcdef")) for _ in range(20)]
                await store.write(one.batch(Entries().of(*some), NOON))

        await asyncio.gather(*(writes(seed, store) for seed, (store, _) in enumerate(stores)))
        assert len(await check(stores[0][1])) == 4 * 15 * 20


async def test_a_batch_whose_first_transaction_is_still_under_way_is_counted_once(url: str) -> None:
    batch = maker().batch(Entries().of(*(record() for _ in range(5))), NOON)
    begun, free, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def slow(connection: Connection) -> None:
        put(connection, batch)
        loop.call_soon_threadsafe(begun.set)
        pausing(connection, free.wait(), loop)

    async with stored(url) as (_, first), stored(url) as (store, database):
        doubtful = asyncio.create_task(first.write(slow))
        await begun.wait()
        again = asyncio.create_task(store.write(batch))
        await asyncio.wait([again], timeout=0.2)  # where this is too short, the test shows less
        assert not again.done()
        free.set()
        await asyncio.gather(doubtful, again)
        assert len(await check(database)) == 5


class Crash(Exception):
    """The process dies here."""


class Crashing:
    """A connection on which the statement of this number is not carried out."""

    def __init__(self, connection: Connection, left: int) -> None:
        self._connection = connection
        self._left = left
        self.dialect = connection.dialect
        self.connection = connection.connection

    def execute(self, *arguments: Any) -> Any:
        return self._counted(self._connection.execute, arguments)

    def exec_driver_sql(self, *arguments: Any) -> Any:
        return self._counted(self._connection.exec_driver_sql, arguments)

    def _counted(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._left:
            raise Crash
        self._left -= 1
        return call(*arguments)


STEPS = st.lists(
    st.tuples(st.sampled_from(["new", "crash", "again", "again", "part"]), st.integers(1, 5), st.integers(0, 2)), max_size=12
)


async def follow(url: str, steps: list[tuple[str, int, int]]) -> None:
    """Batches that are new, that break before a statement, that are written once more, in whole or in part; as a dictionary
    has them by their ids.
    """
    entries, one = Entries(), maker(random.getrandbits(60))
    batches, expected = list[LedgerBatch](), dict[str, Row]()
    async with stored(url) as (store, database):
        for step, count, at in steps:
            if step in ("new", "crash") or not batches:
                entries.clock.now = NOON + at * DAY_S
                batches.append(one.batch(entries.of(*(record(tenant=f"t{number % 3}") for number in range(count))), NOON))
            batch = batches[(count * 7) % len(batches)] if step in ("again", "part") else batches[-1]
            if step == "crash":
                with pytest.raises(Crash):
                    await database.write(lambda each, it=batch, left=at: put(Crashing(each, left), it))  # type: ignore[arg-type, misc]
            else:
                batch = (batch.halves() or [batch])[0] if step == "part" else batch
                await store.write(batch)
                expected |= {row[0]: row for row in batch.rows()}
            found = await check(database)
            assert {row["id"]: tuple(row.values()) for row in found} == expected


@given(steps=STEPS)
@settings(max_examples=share_of(200))
def test_rows_and_sums_agree_after_any_sequence(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    asyncio.run(follow(file_url(tmp_path_factory.mktemp("ledger") / "a.sqlite"), steps))


@pytest.mark.tools
@pytest.mark.parametrize("seed", range(4))
async def test_rows_and_sums_agree_in_postgres(server: Postgres, seed: int) -> None:
    chance = random.Random(seed)
    steps = [(chance.choice(["new", "crash", "again", "part"]), chance.randint(1, 5), chance.randint(0, 2)) for _ in range(25)]
    await follow(server.new(), steps)


async def test_a_whole_batch_is_written(url: str) -> None:
    """SQLite gets it in one statement, whose parameters are bounded."""
    assert MAX_BATCH * max(len(rows.columns), len(daily.columns)) <= 32_766
    entries, one = Entries(), maker()
    async with stored(url) as (store, database):
        batch = one.batch(entries.of(*(record(tenant=f"t{number}", id=f"r{number}") for number in range(MAX_BATCH))), NOON)
        await store.write(batch)
        found = await check(database)
        assert [tuple(row.values()) for row in found] == batch.rows()


async def test_what_is_past_its_time_goes_in_small_steps(url: str) -> None:
    entries, one = Entries(), maker()
    async with stored(url) as (store, database):
        for day in range(5):
            entries.clock.now = NOON + day * DAY_S
            for _ in range(3):
                await store.write(one.batch(entries.of(*(record() for _ in range(MAX_BATCH))), NOON))
        until = int((NOON + 2 * DAY_S) * 1000)
        gone = list[int]()
        while step := await store.purge(until, "2025-11-28"):
            gone.append(step)
        assert sum(gone) == 2 * 3 * MAX_BATCH + 1
        assert max(gone) <= ROWS_PER_PURGE + 1
        assert Counter(row["at_ms"] >= until for row in await database.read(all_rows)) == {True: 3 * 3 * MAX_BATCH}
        assert min(each["day"] for each in await database.read(all_sums)) == "2025-11-28"
        assert await store.purge(until, "2025-11-28") == 0


async def test_a_value_that_the_database_refuses_is_named_as_such(url: str) -> None:
    batch = maker().batch(Entries().of(record(status=2**70)), NOON)
    async with stored(url) as (store, _):
        with pytest.raises(InvalidValueError):
            await store.write(batch)
        await store.write(maker(2).batch(Entries().of(record()), NOON))


async def test_the_tables_of_responses_may_be_in_the_same_database(url: str) -> None:
    from gateway.features.histories.tables import TABLES as RESPONSES

    for _ in range(2):
        responses = Database(url, RESPONSES)
        await responses.open()
        async with stored(url) as (store, database):
            await store.write(maker().batch(Entries().of(record()), NOON))
            assert len(await check(database)) == 1
        await responses.close()


async def test_a_corrupt_file_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    content = b"no database at all" * 1000
    path.write_bytes(content)
    with pytest.raises(StoreFailed, match="not a database"):
        await open_ledger_store(file_url(path))
    assert path.read_bytes() == content


async def test_a_file_that_is_damaged_inside_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with stored(file_url(path)) as (store, _):
        for seed in range(20):
            await store.write(maker(seed).batch(Entries().of(*(record() for _ in range(100))), NOON))
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(StoreFailed, match=r"malformed|not a database"):
        async with stored(file_url(path)) as (store, _):
            await store.write(maker(99).batch(Entries().of(record()), NOON))


async def test_what_is_opened_to_be_read_is_not_made(tmp_path: Path, url: str) -> None:
    from gateway.features.ledger.tables import TABLES

    with pytest.raises(StoreFailed, match="No such file"):
        await Database(file_url(tmp_path / "none.sqlite"), TABLES, read_only=True).open()
    assert not (tmp_path / "none.sqlite").exists()
    other = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(other)) as file, file:
        file.execute("create table mine (a)")
    before = other.read_bytes()
    with pytest.raises(StoreFailed, match="has no ledger in it"):
        await Database(file_url(other), TABLES, read_only=True).open()
    assert other.read_bytes() == before
    async with stored(url) as (store, _):
        await store.write(maker().batch(Entries().of(record()), NOON))
    reader = Database(url, TABLES, read_only=True)
    await reader.open()
    assert len(await reader.read(all_rows)) == 1
    await reader.close()


@pytest.mark.tools
async def test_rows_of_two_parts_of_the_world_have_one_order(server: Postgres) -> None:
    """The range of a batch's ids is looked up as text: in any collation its ids, and no other ones, are in it."""
    server.execute("CREATE DATABASE icu TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'")
    async with stored(server.url("icu")) as (store, database):
        batch = maker().batch(Entries().of(*(record() for _ in range(40))), NOON)
        for _ in range(2):
            await store.write(batch)
        assert (await database.read(lambda each: each.execute(text("SELECT count(*) FROM warmroute_usage")))).scalar() == 40
