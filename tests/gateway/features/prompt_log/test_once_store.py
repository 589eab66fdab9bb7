"""The store of tokens, on SQLite and Postgres: who gets a token, and the conditions of each write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sqlalchemy import Connection

from gateway.database.database import Database
from gateway.features.histories.tables import TABLES
from gateway.features.prompt_log.once.store import ALIVE_S, STOPPED_S, TOKEN_S, OnceStore
from tests.gateway.features.histories.conftest import Clock

KEY = ("o", "token-1")


@contextlib.asynccontextmanager
async def store_at(url: str, clock: Clock) -> AsyncIterator[tuple[OnceStore, Database]]:
    database = Database(url, TABLES)
    await database.open()
    try:
        yield OnceStore(database, clock), database
    finally:
        await database.close()


async def end(store: OnceStore, database: Database, runner: str) -> None:
    work = store.ended(KEY, runner)

    def within(connection: Connection) -> None:
        work(connection, "turn_1")

    await database.write(within)


async def test_one_of_many_gets_a_token(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as (one, _), store_at(url, clock) as (other, _):
        claims = [(one, other)[number % 2].claim(KEY, "d", f"runner-{number}", None) for number in range(8)]
        assert (await asyncio.gather(*claims)).count(True) == 1
        found = await one.find(KEY)
        assert found is not None
        assert one.is_alive(found)
        assert await one.running_among([KEY, ("x", KEY[1])]) == {KEY}
        assert await one.claim(KEY, "d", found.runner, None), "a write that was repeated, because its commit was in doubt"
        clock.now += ALIVE_S
        assert not one.is_alive(found)
        takers = [(one, other)[number % 2].claim(KEY, "d", f"taker-{number}", found) for number in range(8)]
        assert (await asyncio.gather(*takers)).count(True) == 1


async def test_what_a_runner_writes_counts_while_it_has_the_token(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as (store, database):
        await store.claim(KEY, "d", "first", None)
        seen = await store.find(KEY)
        clock.now += ALIVE_S
        assert await store.claim(KEY, "d", "second", seen)
        await end(store, database, "first")
        await store.withdraw(KEY, "first")
        await store.renew(["first"])
        found = await store.find(KEY)
        assert found is not None
        assert (found.runner, found.turn, found.alive_until) == ("second", "", clock.now + ALIVE_S)
        assert await store.mine(["first", "second"]) == {"second"}
        assert await store.stop(("another", KEY[1])) is False
        await end(store, database, "second")
        await store.withdraw(KEY, "second")
        assert await store.stop(KEY) is False, "it has ended"
        found = await store.find(KEY)
        assert found is not None
        assert (found.turn, found.expires_at) == ("turn_1", clock.now + TOKEN_S)
        assert await store.expiry("o", "turn_1") is None
        clock.now += TOKEN_S
        assert await store.find(KEY) is None
        assert await store.claim(KEY, "e", "third", None), "an expired token is like none"
        assert await store.purge() == 0


async def test_the_token_of_a_stopped_generation_is_free(url: str) -> None:
    clock = Clock()
    async with store_at(url, clock) as (store, _):
        await store.claim(KEY, "d", "first", None)
        assert await store.stop(KEY)
        assert (await store.mine(["first"]), await store.running_among([KEY]), await store.stop(KEY)) == (set(), set(), False)
        seen = await store.find(KEY)
        assert seen is not None
        assert (seen.stopped, store.is_alive(seen)) == (True, False)
        await store.withdraw(KEY, "first")
        assert await store.find(KEY) == seen, "those who wait for it read it"
        assert await store.claim(KEY, "e", "second", seen)
        assert await store.stop(KEY)
        clock.now += STOPPED_S
        assert (await store.find(KEY), await store.stop(KEY)) == (None, False)
        assert await store.purge() == 1
        await store.claim(KEY, "d", "third", None)
        clock.now += TOKEN_S + ALIVE_S
        assert await store.purge() == 1
