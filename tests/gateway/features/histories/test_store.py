"""The store of responses, over a real file."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection
from sqlalchemy.dialects.sqlite import dialect as sqlite_dialect

from gateway.database.database import MAX_WAITING, Database
from gateway.database.driver import CONNECTIONS
from gateway.database.failures import StoreError, StoreFailed
from gateway.features.histories import names
from gateway.features.histories.purging import TOMBSTONE_S, delete_emptied, emptied
from gateway.features.histories.records import ExpiredObjectError, HistoryTooLargeError, RunEnd, UnknownObjectError
from gateway.features.histories.store import MAX_TURNS, HistoryStore
from gateway.features.histories.tables import TABLES, VERSION
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.runs.stored_runs import RunStore
from tests.gateway.features.histories.conftest import TTL_S, Clock, file_url, opened, pausing, response
from tests.support.machines import share_of

MANY = 1 << 40


async def outcome(work: Any) -> Any:
    try:
        return await work
    except StoreError as error:
        return type(error).__name__, error.args[0]


async def test_what_was_put_is_there_and_its_history(url: str) -> None:
    async with opened(url) as store:
        for id_, parent in (("a", ""), ("b", "a"), ("c", "b"), ("other", "a")):
            await store.put(response(id_, parent))
        assert await store.get("o", "b") == response("b", "a")
        chain = await store.chain("o", "c", MANY)
        assert [(each.id, each.input, each.output) for each in chain] == [
            (id_, response(id_).input, response(id_).output) for id_ in "abc"
        ]
    async with opened(url) as again:
        assert await again.get("o", "b") == response("b", "a"), "it outlives the process"


async def test_the_same_response_may_be_written_twice(url: str) -> None:
    async with opened(url) as store:
        assert await store.put(response("a"))
        assert await store.put(response("a", size=9))
        assert await store.get("o", "a") == response("a", size=9)


async def test_an_id_that_is_taken_stays_with_its_response_until_that_has_expired(url: str) -> None:
    clock = Clock()
    other = replace(response("a", size=9), created_at=response("a").created_at + 1)
    async with opened(url, clock) as store:
        await store.put(response("a"))
        assert not await store.put(other)
        assert not await store.put(replace(other, parent="a"))
        assert await store.get("o", "a") == response("a")
        assert await store.put(replace(other, owner="p")), "an id says nothing without its owner"
        clock.now += TTL_S
        assert await store.put(other)
        assert await store.get("o", "a") == other
        await store.delete("o", "a")
        assert await store.put(response("a"))


async def test_an_id_says_nothing_without_its_owner(url: str) -> None:
    async with opened(url) as store:
        await store.put(response("a"))
        await store.put(response("b", "a", owner="p"))
        for work in (store.get("p", "a"), store.chain("p", "a", MANY), store.get("o", "never")):
            with pytest.raises(UnknownObjectError):
                await work
        assert not await store.delete("p", "a")
        assert await store.get("o", "a")
        with pytest.raises(UnknownObjectError, match="a"):
            await store.chain("p", "b", MANY)


async def test_a_deleted_response_is_no_history(url: str) -> None:
    async with opened(url) as store:
        for id_, parent in (("a", ""), ("b", "a"), ("c", "b")):
            await store.put(response(id_, parent))
        assert await store.delete("o", "b")
        assert not await store.delete("o", "b")
        with pytest.raises(UnknownObjectError) as caught:
            await store.chain("o", "c", MANY)
        assert caught.value.id == "b"
        assert [each.id for each in await store.chain("o", "a", MANY)] == ["a"]


async def test_too_large_a_history_is_not_read(url: str) -> None:
    async with opened(url) as store:
        await store.put(response("a", size=1000))
        await store.put(response("b", "a", size=1000))
        assert await store.chain("o", "a", 2000)
        with pytest.raises(HistoryTooLargeError) as caught:
            await store.chain("o", "b", 2000)
        assert 2000 < caught.value.size < 2100


async def test_ids_in_a_circle_end(url: str) -> None:
    """A replica that gives ids twice makes them."""
    async with opened(url) as store:
        await store.put(response("a", "a"))
        assert len(await store.chain("o", "a", MANY)) == 1
        await store.put(response("b", "a"))
        await store.put(response("a", "b"))
        with pytest.raises(UnknownObjectError):
            await store.chain("o", "a", MANY)


async def test_a_tree_expires_together_and_going_on_renews_it(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await store.put(response("a"))
        await store.put(response("lone"))
        clock.now += TTL_S / 2
        await store.put(response("b", "a"))
        clock.now += TTL_S / 2 + 1
        assert [each.id for each in await store.chain("o", "b", MANY)] == ["a", "b"]
        for work in (store.get("o", "lone"), store.chain("o", "lone", MANY)):
            with pytest.raises(ExpiredObjectError) as caught:
                await work
            assert caught.value.ttl_s == TTL_S
        clock.now += TTL_S
        assert not await store.delete("o", "a"), "it is gone already"
        with pytest.raises(ExpiredObjectError):
            await store.chain("o", "b", MANY)


class Explained:
    """In the place of a connection: how SQLite would go about each statement."""

    rowcount = 0
    dialect = sqlite_dialect()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps = list[str]()

    def execute(self, statement: Any) -> Explained:
        text = str(statement.compile(dialect=sqlite_dialect(), compile_kwargs={"literal_binds": True}))
        with contextlib.closing(sqlite3.connect(self.path)) as file:
            self.steps += [row[3] for row in file.execute(f"explain query plan {text}")]
        return self

    def all(self) -> list[Any]:
        return []


async def test_no_step_of_a_purge_reads_a_whole_table(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(file_url(path)) as store:
        await store.put(response("a"))
    explained: Any = Explained(path)
    emptied(explained, 1.0)
    delete_emptied(explained, 1.0)
    names.remove(explained, "o", "a")
    assert len(explained.steps) > 8
    assert [step for step in explained.steps if step.startswith("SCAN")] == []


async def test_what_has_expired_is_emptied_and_its_id_is_known_for_a_while(url: str) -> None:
    clock = Clock()
    async with opened(url, clock) as store:
        await asyncio.gather(*(store.put(response(f"r{number}", size=300)) for number in range(1200)))
        assert await store.purge() == 0
        clock.now += TTL_S + 1
        await store.put(response("new"))
        gone = 0
        while found := await store.purge():
            assert found <= 1000, "in pieces: others want to write"
            gone += found
        assert gone == 1200
        with pytest.raises(ExpiredObjectError):
            await store.get("o", "r7")
        clock.now += TOMBSTONE_S
        while await store.purge():
            pass
        with pytest.raises(UnknownObjectError):
            await store.get("o", "r7")
        with pytest.raises(ExpiredObjectError):
            await store.get("o", "new")


IDS = st.sampled_from("abcdef")
OWNERS = st.sampled_from("op")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), OWNERS, IDS, st.sampled_from(["", *"abcdef"])),
        st.tuples(st.just("delete"), OWNERS, IDS),
        st.tuples(st.just("wait"), st.sampled_from([10.0, TTL_S * 0.2, TTL_S * 0.7, TTL_S, TOMBSTONE_S])),
        st.tuples(st.just("purge")),
    ),
    max_size=25,
)


class Oracle:
    """The same with dictionaries. known: by owner and id: (parent, root, expires_at)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.known: dict[tuple[str, str], tuple[str, str, float]] = {}
        self.gone: set[tuple[str, str]] = set()

    def put(self, owner: str, id_: str, parent: str) -> None:
        expires_at, root = self.clock.now + TTL_S, id_
        parent = "" if parent == id_ else parent
        if before := self.known.get((owner, parent)):
            root = before[1]
            if before[2] >= expires_at - TTL_S * 0.1:
                expires_at = before[2]
            else:
                for key, each in self.known.items():
                    if key[0] == owner and each[1] == root and key not in self.gone:
                        self.known[key] = each[0], root, expires_at
        self.known[owner, id_] = parent, root, expires_at
        self.gone.discard((owner, id_))

    def get(self, owner: str, id_: str) -> str:
        found = self.known.get((owner, id_))
        if found is None:
            return "UnknownObjectError"
        return "ExpiredObjectError" if (owner, id_) in self.gone or found[2] <= self.clock.now else "there"

    def delete(self, owner: str, id_: str) -> bool:
        if self.get(owner, id_) != "there":
            return False
        del self.known[owner, id_]
        return True

    def purge(self) -> None:
        now = self.clock.now
        self.gone |= {key for key, each in self.known.items() if each[2] <= now}
        for key in [key for key in self.gone if self.known[key][2] <= now - TOMBSTONE_S]:
            del self.known[key]
            self.gone.discard(key)


@settings(max_examples=share_of(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_it_does_what_dictionaries_do(url: str, steps: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        clock = Clock()
        oracle = Oracle(clock)
        async with opened(url, clock, empty=True) as store:
            for name, *arguments in steps:
                if name == "put":
                    owner, id_, parent = arguments
                    await store.put(response(id_, parent, owner))
                    oracle.put(owner, id_, parent)
                elif name == "delete":
                    assert await store.delete(*arguments) == oracle.delete(*arguments)
                elif name == "wait":
                    clock.now += arguments[0]
                else:
                    while await store.purge():
                        pass
                    oracle.purge()
                for owner in "op":
                    for id_ in "abcdef":
                        found = await outcome(store.get(owner, id_))
                        expected = oracle.get(owner, id_)
                        if expected == "there":
                            assert (found.owner, found.id) == (owner, id_)
                        else:
                            assert found == (expected, id_)

    asyncio.run(run())


async def test_a_history_of_too_many_turns(url: str) -> None:
    """A thousand are read; one beyond the most is not, however it came there."""
    async with opened(url) as store:
        for begin in range(0, 1000, 100):  # each has its time
            some = range(begin, begin + 100)
            await asyncio.gather(*(store.put(response(f"r{at}", f"r{at - 1}" if at else "")) for at in some))
        chain = await store.chain("o", "r999", MANY)
        assert [each.id for each in chain] == [f"r{at}" for at in range(1000)]
        await store.put(response("r1000", "r999"))
        await _lengthened(store, "r1000", MAX_TURNS)
        await store.put(response("last", "r1000"))
        with pytest.raises(HistoryTooLargeError) as caught:
            await store.chain("o", "last", MANY)
        assert caught.value.turns == MAX_TURNS + 1


async def _lengthened(store: HistoryStore, id_: str, turns: int) -> None:
    from sqlalchemy import update

    from gateway.features.histories.tables import responses

    await store._database.write(lambda each: each.execute(update(responses).where(responses.c.id == id_).values(turns=turns)))


async def test_its_file_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.sqlite"
    async with opened(file_url(path)) as store:
        await store.put(response("a"))
        for each in path.parent.iterdir():
            assert stat.S_IMODE(each.stat().st_mode) == 0o600, each
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_what_cannot_be_a_database_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreFailed, match="not a database"):
        await Database(f"sqlite:///{bad}", TABLES).open()
    with pytest.raises(StoreFailed, match="mysql"):
        Database("mysql://a/b", TABLES)
    with pytest.raises(StoreFailed, match="no database URL"):
        Database("nonsense", TABLES)
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match="file"):
        await Database(f"sqlite:///{tmp_path}/file/a.sqlite", TABLES).open()


async def test_another_version_of_the_tables_is_refused(url: str) -> None:
    from sqlalchemy import update

    from gateway.features.histories.tables import versions

    async with opened(url) as store:
        await store._database.write(lambda each: each.execute(update(versions).values(version=99)))
    with pytest.raises(StoreFailed, match="version 99"):
        await Database(url, TABLES).open()


async def test_a_write_that_fails_fails_alone(url: str) -> None:
    async with opened(url) as store:

        def broken(_connection: Any) -> None:
            raise UnknownObjectError("x")

        results = await asyncio.gather(
            *(store.put(response(f"a{at}")) for at in range(20)),
            store._database.write(broken),
            *(store.put(response(f"b{at}")) for at in range(20)),
            return_exceptions=True,
        )
        assert [each for each in results if each is not True] == [results[20]]
        assert isinstance(results[20], UnknownObjectError)
        for at in range(20):
            assert await store.get("o", f"a{at}")
            assert await store.get("o", f"b{at}")


async def test_reads_wait_for_no_writer(tmp_path: Path) -> None:
    """Not even for one in another gateway."""
    path = tmp_path / "a.sqlite"
    async with opened(file_url(path)) as store:
        await store.put(response("a"))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert await store.get("o", "a")
            assert await store.chain("o", "a", MANY)


async def test_a_full_database_says_so(tmp_path: Path) -> None:
    async with opened(file_url(tmp_path / "a.sqlite")) as store:
        await store.put(response("a"))
        await store._database.write(lambda each: each.exec_driver_sql("PRAGMA max_page_count=30"))
        results = await asyncio.gather(*(store.put(response(f"b{at}", size=9000)) for at in range(40)), return_exceptions=True)
        assert any(isinstance(each, StoreFailed) and "full" in str(each) for each in results)
        assert await store.get("o", "a")
        for at, each in enumerate(results):  # what was acknowledged is there, and nothing else
            found = await outcome(store.get("o", f"b{at}"))
            assert (found == ("UnknownObjectError", f"b{at}")) == isinstance(each, StoreFailed)


async def test_writes_that_wait_are_bounded(url: str) -> None:
    async with opened(url) as store:
        free, loop = asyncio.Event(), asyncio.get_running_loop()

        def blocks(connection: Connection) -> None:
            pausing(connection, free.wait(), loop)

        first = asyncio.ensure_future(store._database.write(blocks))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(store.delete("o", "x")) for _ in range(MAX_WAITING + 50)]
        await asyncio.sleep(0)
        refused = [each for each in waiting if each.done()]
        assert len(refused) >= 50
        with pytest.raises(StoreFailed, match="wait for the database"):
            refused[0].result()
        for each in waiting:
            each.cancel()
        free.set()
        await first
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not await store.delete("o", "x"), "it goes on"


async def test_a_file_of_version_1_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(file_url(path)) as store:
        await store.put(response("a"))
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("drop table warmroute_runs")
        file.execute("update warmroute_schema set version = 1")
    async with opened(file_url(path)) as store:
        assert (await store.get("o", "a")).id == "a"
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("select version from warmroute_schema").fetchall() == [(VERSION,)]
        assert file.execute("select count(*) from warmroute_runs").fetchall() == [(0,)]


async def test_while_reads_have_all_their_places_writes_go_on_and_further_reads_wait(tmp_path: Path) -> None:
    database = Database(file_url(tmp_path / "a.sqlite"), TABLES)
    await database.open()
    free, loop = [asyncio.Event() for _ in range(CONNECTIONS - 1)], asyncio.get_running_loop()

    async def held(number: int) -> None:
        def work(connection: Connection) -> None:
            pausing(connection, free[number].wait(), loop)

        await database.read(work)

    def nothing(_connection: Any) -> int:
        return 1

    try:
        holding = [asyncio.create_task(held(number)) for number in range(len(free))]
        waiting = asyncio.create_task(database.read(nothing))
        await asyncio.sleep(0)
        assert await database.write(nothing) == 1, "the writer has a connection of its own"
        for event in free:
            event.set()
        await asyncio.gather(*holding)
        assert await waiting == 1
    finally:
        await database.close()


async def test_a_run_that_ends_when_it_has_expired_leaves_no_names(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "a.sqlite"
    database = Database(file_url(path), TABLES)
    await database.open()
    store = RunStore(database, TTL_S, clock, ResponseRuns())
    await store.begin(response("a"), "me")
    clock.now += TTL_S + 1
    while await store.purge():
        pass
    await store.finish("o", "a", RunEnd("completed", b"", b"{}", ("m1",)))
    await store.begin(response("b"), "me")
    await store.finish("o", "b", RunEnd("completed", b'{"id":"m2"}', b"{}", ("m2",)))
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        assert file.execute("select id from warmroute_names").fetchall() == [("m2",)]
