"""A Postgres server that stops, hangs and refuses, and gateways that are in each other's way there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from gateway.database.database import Database
from gateway.database.failures import StoreFailed
from gateway.features.histories.records import UnknownObjectError
from gateway.features.histories.store import HistoryStore
from gateway.features.histories.tables import TABLES
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, opened, response
from tests.support.databases import answered
from tests.support.postgres import Postgres, postgres

pytestmark = pytest.mark.tools


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    """For a test that stops it."""
    with postgres() as started:
        yield started


async def test_a_restart_of_the_server_costs_the_requests_of_that_time(own_server: Postgres) -> None:
    async with opened(own_server.new()) as store:
        await store.put(response("a"))
        own_server.stop()
        for work in (store.put(response("b")), store.get("o", "a"), store.purge()):
            with pytest.raises(StoreFailed):
                await work
        own_server.start()
        await store.put(response("c", "a"))
        assert [each.id for each in await store.chain("o", "c", 1 << 30)] == ["a", "c"]
        with pytest.raises(UnknownObjectError):
            await store.get("o", "b")


async def test_what_was_acknowledged_outlives_a_crash_of_the_server_under_load(own_server: Postgres) -> None:
    url = own_server.new()
    async with opened(url) as store:
        acknowledged = list[str]()
        failures = list[StoreFailed]()
        enough = asyncio.Event()

        async def lane(name: str) -> None:
            number = 0
            while not failures:
                try:
                    await store.put(response(f"{name}-{number}", f"{name}-{number - 1}" if number else "", size=500))
                except StoreFailed as failure:
                    failures.append(failure)
                else:
                    acknowledged.append(f"{name}-{number}")
                    number += 1
                if len(acknowledged) > 200:
                    enough.set()

        lanes = [asyncio.create_task(lane(name)) for name in "abcd"]
        await enough.wait()
        own_server.stop()
        await asyncio.gather(*lanes)
        own_server.start()
        assert len(acknowledged) > 200
        for id_ in acknowledged:
            await store.get("o", id_)


def has_not(connection: Connection) -> None:
    connection.execute(text("SELECT 1"))
    raise LookupError


async def test_a_server_that_hangs_is_left_alone_for_a_while(own_server: Postgres) -> None:
    url = own_server.new()
    async with opened(url):  # to make its tables may take longer
        pass
    database = Database(url, TABLES, 1.0)
    await database.open()
    store = RunStore(database, TTL_S, Clock(), ResponseRuns())
    await store.put(response("a"))
    own_server.hang()
    try:
        async with asyncio.timeout(60):  # of a second each
            works = [store.put(response("b")), store.get("o", "a"), store.get("o", "a"), store.delete("o", "a")]
            results = await asyncio.gather(*works, return_exceptions=True)
        assert [type(each) for each in results] == [StoreFailed] * 4
        assert all("within 1 s" in str(each) for each in results)
        for work in (store.get("o", "a"), store.put(response("c"))):
            with pytest.raises(StoreFailed):
                work.send(None)  # at once: it waits for nothing
    finally:
        own_server.go_on()
    assert await answered(lambda: store.get("o", "a"))
    with pytest.raises(LookupError):  # what the database has not got is an answer of the database's
        await database.read(has_not)
    await store.put(response("d"))
    await store.close()


async def test_a_server_that_hangs_does_not_keep_the_gateway_from_its_end(own_server: Postgres) -> None:
    database = Database(own_server.new(), TABLES, 2)
    await database.open()
    own_server.hang()
    try:
        async with asyncio.timeout(60):
            with pytest.raises(StoreFailed):
                await HistoryStore(database, TTL_S).put(response("a"))
            await database.close()
    finally:
        own_server.go_on()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://t:wrong@127.0.0.1:{port}/postgres", "password authentication failed"),
        ("postgresql://t:right-one@127.0.0.1:{port}/never", 'database "never" does not exist'),
        ("postgresql://t:right-one@127.0.0.1:1/postgres", "127.0.0.1"),
        ("postgresql://t:right-one@127.0.0.1:{port}/postgres?sslmode=require", "rejected SSL"),
        ("postgresql://t:right-one@127.0.0.1:{port}/postgres?no_such_thing=1", "no_such_thing"),
    ],
)
async def test_what_cannot_be_opened_says_why(server: Postgres, url: str, reason: str) -> None:
    with pytest.raises(StoreFailed, match=reason) as caught:
        await Database(url.format(port=server.port), TABLES).open()
    assert "right-one" not in str(caught.value)


async def test_many_gateways_open_an_empty_database_at_once(server: Postgres) -> None:
    url = server.new()
    databases = [Database(url, TABLES) for _ in range(12)]
    await asyncio.gather(*(each.open() for each in databases))
    await HistoryStore(databases[0], TTL_S).put(response("a"))
    assert await HistoryStore(databases[-1], TTL_S, lambda: 0.0).get("o", "a")
    await asyncio.gather(*(each.close() for each in databases))


async def test_a_role_that_may_not_create_tables_uses_those_that_are_there(server: Postgres) -> None:
    url = server.new()
    name = url.rpartition("/")[2]
    async with opened(url):
        pass
    server.execute("CREATE ROLE small LOGIN PASSWORD 'p'")
    server.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO small", name)
    async with opened(url.replace("t:right-one", "small:p")) as store:
        await store.put(response("a"))
        assert await store.get("o", "a")


async def test_two_gateways_in_each_others_way_lose_nothing(server: Postgres) -> None:
    """They renew the same two trees, in opposite order, and one puts what the other one puts."""
    url, clock = server.new(), Clock()
    async with opened(url, clock) as one, opened(url, clock) as two:
        for id_ in "ab":
            await one.put(response(id_))
        for number in range(30):
            clock.now += TTL_S * 0.2  # all are due to be renewed
            works = [one.put(response(f"{number}{id_}", id_)) for id_ in "ab"]
            works += [two.put(response(f"{number}{id_}", id_)) for id_ in "ba"]
            await asyncio.gather(*works)
        for number in range(30):
            for id_ in "ab":
                assert len(await one.chain("o", f"{number}{id_}", 1 << 30)) == 2


async def test_a_deadlock_is_tried_again(server: Postgres) -> None:
    """Each of two transactions holds what the other one wants."""
    url, both = server.new(), asyncio.Barrier(2)
    async with opened(url) as one, opened(url) as two:
        for id_ in "ab":
            await one.put(response(id_))
        tries = list[str]()

        def crosswise(first: str, second: str) -> Any:
            def work(connection: Connection) -> str:
                tries.append(first)
                _touch(connection, first)
                if len(tries) <= 2:
                    await_only(both.wait())
                _touch(connection, second)
                return first

            return work

        databases = one._database, two._database
        results = await asyncio.gather(databases[0].write(crosswise("a", "b")), databases[1].write(crosswise("b", "a")))
        assert results == ["a", "b"]
        assert len(tries) > 2


async def test_a_conflict_that_does_not_end_is_an_error(server: Postgres) -> None:
    async with opened(server.new()) as store:
        tries = 0

        def work(connection: Connection) -> None:
            nonlocal tries
            tries += 1
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

        with pytest.raises(StoreFailed, match="again") as caught:
            await store._database.write(work)
        assert isinstance(caught.value.__cause__, DBAPIError)
        assert tries == 5


def _touch(connection: Connection, id_: str) -> None:
    connection.execute(text("UPDATE warmroute_responses SET status = status WHERE id = :id"), {"id": id_})
