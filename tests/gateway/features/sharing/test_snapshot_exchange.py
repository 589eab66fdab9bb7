"""Snapshots of other gateways: what is read of them at once, and what becomes of those that cannot be had."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from redis.exceptions import TimeoutError as Late

from gateway.cluster.messages import EVERYTHING_S, Want
from gateway.features.sharing import offers
from gateway.features.sharing.clock import StoreClock
from gateway.features.sharing.entry_reader import MARGIN_S, EntryReader
from gateway.features.sharing.messages import Kind, Offer
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.outbox import Outbox
from gateway.features.sharing.snapshot_exchange import AGAIN_S, MAX_STORED_BYTES, SIBLING_S, TRIES, SnapshotExchange
from gateway.features.snapshots.frames import frames_of
from gateway.features.snapshots.snapshot import MAX_CHUNK_BYTES, Header, KnowledgeError, Snapshot
from gateway.features.table import new_metrics
from tests.gateway.conftest import eventually
from tests.gateway.features.sharing.test_slow_store import Seen

PREFIX = "warmroute:{default}:"


def frames(*chunks: bytes) -> list[bytes]:
    return list(frames_of(Snapshot(Header("1/256", {}), chunks, 1.0)))


class Lists:
    """The commands of a client about lists. asked: how many elements each time."""

    def __init__(self, *elements: bytes, late: bool = False) -> None:
        self.elements = list(elements)
        self.late = late
        self.asked: list[int] = []
        self.deleted: list[str] = []

    async def lrange(self, _key: str, first: int, last: int) -> list[bytes]:
        self.asked.append(last - first + 1)
        if self.late:
            raise Late("the answer took longer")
        return self.elements[first : last + 1]

    async def delete(self, key: str) -> None:
        self.deleted.append(key)


async def test_short_chunks_are_read_many_at_once_and_long_ones_singly() -> None:
    short = Lists(*frames(*[b"x" * 1000] * 500))
    found = await offers.get(short, PREFIX, f"{PREFIX}snapshot:a", 1.0)
    assert len(found.chunks) == 500
    assert max(short.asked) == offers.MAX_FRAMES_PER_READ
    long = Lists(*frames(*[b"x" * (2 << 20)] * 5))
    assert len((await offers.get(long, PREFIX, f"{PREFIX}snapshot:a", 1.0)).chunks) == 5
    assert long.asked == [1, 2, 1, 1, 1, 1]
    hostile = Lists(*frames(*[b"x" * (MAX_CHUNK_BYTES + 1)] * 64))
    with pytest.raises(KnowledgeError, match="too large"):
        await offers.get(hostile, PREFIX, f"{PREFIX}snapshot:a", 1.0)
    assert hostile.asked == [1, 2], "two of them at most are read before they are refused"


@contextlib.asynccontextmanager
async def doing(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Until the end."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Taking(Seen):
    """Takes a snapshot in when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.taken: list[Snapshot] = []
        self.asked: list[float] = []

    async def restore(self, snapshot: Snapshot) -> None:
        await self.may.wait()
        self.taken.append(snapshot)

    async def collect(self, since_s: float = math.inf, most_bytes: int = 0) -> Snapshot | None:
        self.asked.append(since_s)
        return None


def key(name: str) -> str:
    return f"{PREFIX}snapshot:{name}"


def exchange_of(
    seen: Seen,
    now: Callable[[], float] = lambda: 0.0,
    add: Callable[[Kind], None] = lambda _item: None,
    sibling_s: float = SIBLING_S,
) -> tuple[SnapshotExchange, EntryReader]:
    metrics = new_metrics().of(SharingMetrics)
    entry_reader = EntryReader(
        me="me",
        format="1/256",
        routers=seen,
        outbox=Outbox(lambda: 0.0),
        store_clock=StoreClock(),
        clock=now,
        metrics=metrics,
    )
    made = SnapshotExchange(
        entry_reader=entry_reader, routers=seen, metrics=metrics, clock=now, prefix=PREFIX, add=add, sibling_s=sibling_s
    )
    return made, entry_reader


async def test_one_that_loses_the_store_each_time_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    exchange, entry_reader = exchange_of(seen)
    exchange.started()
    entry_reader.offers.append((Offer("me", f"{PREFIX}snapshot:bad", 0.0), 0.0))
    entry_reader.offers.append((Offer("me", f"{PREFIX}snapshot:good", 0.0), 0.0))
    for _ in range(TRIES):  # the link connects anew each time
        with pytest.raises(Late):
            await exchange.serve(Lists(late=True))
    good = Lists(*frames())
    with caplog.at_level(logging.WARNING):
        async with doing(exchange.serve(good)):
            await eventually(lambda: good.deleted == [f"{PREFIX}snapshot:good"])
    assert [record.message for record in caplog.records] == ["a snapshot was not exchanged"]


async def test_only_keys_of_snapshots_are_removed() -> None:
    lists = Lists()
    await offers.remove(lists, PREFIX, "somebody:else")
    await offers.remove(lists, PREFIX, f"{PREFIX}log")
    assert lists.deleted == []


async def begins(exchange: SnapshotExchange, entry_reader: EntryReader, added: list[Kind]) -> asyncio.Task[Snapshot | None]:
    """A start that has asked the only sibling."""
    entry_reader.peers.receive("sibling", "host", 1, 0.0)
    exchange.read(to_end=True)
    first = asyncio.create_task(exchange.first_snapshot())
    await eventually(lambda: added == [Want("sibling", EVERYTHING_S)])
    return first


async def test_what_others_offer_is_no_answer_to_a_start_and_waits_for_its_end() -> None:
    """One that is back from an outage offers its last seconds to all, while another one begins."""
    seen = Taking()
    seen.may.set()
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(seen, add=added.append)
    async with doing(exchange.serve(Lists(*frames(b"seconds"))), exchange.apply()):
        first = await begins(exchange, entry_reader, added)
        entry_reader.offers.append((Offer("", key("to-all"), 0.0), 0.0))
        entry_reader.offers.append((Offer("me", key("missed"), 0.0), 1.0))
        entry_reader.offers.append((Offer("me", key("everything"), 0.0, first=True), 2.0))
        exchange.read(to_end=True)
        found = await first
        assert found is not None
        assert found.at == 2.0
        assert not seen.taken
        exchange.started()
        await eventually(lambda: [each.at for each in seen.taken] == [0.0, 1.0])


async def begins_alone(exchange: SnapshotExchange, now: list[float]) -> None:
    """None of those that it asks answers in time."""
    assert await exchange.first_snapshot() is None
    exchange.started()
    now[0] += AGAIN_S


@pytest.mark.parametrize("gone", ["the sibling", "the store"])
async def test_no_start_waits_for_an_answer_that_cannot_come(gone: str, caplog: pytest.LogCaptureFixture) -> None:
    """sibling_s is longer than the test may take."""
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(Taking(), add=added.append, sibling_s=1000.0)
    first = await begins(exchange, entry_reader, added)
    if gone == "the sibling":
        entry_reader.peers.leave("sibling", silent=True)
    else:
        exchange.lost()
    assert await first is None
    said = (
        "another gateway has sent no snapshot"
        if gone == "the sibling"
        else "the store cannot be used yet: this gateway starts alone"
    )
    assert caplog.messages == [said]


async def test_a_start_waits_for_a_store_that_comes_back() -> None:
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(Taking(), add=added.append)
    async with doing(exchange.serve(Lists(*frames(b"everything")))):
        first = await begins(exchange, entry_reader, added)
        exchange.lost()
        entry_reader.offers.append((Offer("me", key("everything"), 0.0, first=True), 2.0))
        exchange.read(to_end=True)
        assert await first is not None


async def test_one_that_began_alone_takes_a_late_answer_and_asks_again_until_it_has_one() -> None:
    seen, now = Taking(), [0.0]
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(seen, lambda: now[0], added.append, sibling_s=0.01)
    entry_reader.peers.receive("sibling", "host", 1, 0.0)
    lists = Lists(*frames(b"everything"))
    exchange.read(to_end=True)
    await begins_alone(exchange, now)
    assert added == [Want("sibling", EVERYTHING_S)]
    for _ in range(3):
        exchange.read(to_end=True)
    assert added == [Want("sibling", EVERYTHING_S)] * 2
    entry_reader.offers.append((Offer("me", key("late"), 0.0, first=True), 2.0))
    entry_reader.offers.append((Offer("me", key("later"), 0.0, first=True), 3.0))
    now[0] += AGAIN_S - 1
    exchange.read(to_end=True)
    async with doing(exchange.serve(lists), exchange.apply()):
        seen.may.set()
        await eventually(lambda: lists.deleted == [key("late"), key("later")])
        await eventually(lambda: [each.at for each in seen.taken] == [2.0])
    now[0] += AGAIN_S
    exchange.read(to_end=True)
    assert len(added) == 2


async def test_one_that_began_alone_asks_no_more_once_it_has_heard_that_nothing_is_known() -> None:
    now = [0.0]
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(Taking(), lambda: now[0], added.append, sibling_s=0.01)
    entry_reader.peers.receive("sibling", "host", 1, 0.0)
    exchange.read(to_end=True)
    await begins_alone(exchange, now)
    entry_reader.offers.append((Offer("me", "", 0.0, first=True), 0.0))
    async with doing(exchange.serve(Lists())):
        await eventually(lambda: not entry_reader.offers)
    exchange.read(to_end=True)
    assert added == [Want("sibling", EVERYTHING_S)]


async def test_nothing_to_begin_with_is_said_by_the_one_that_was_asked() -> None:
    added: list[Kind] = []
    exchange, entry_reader = exchange_of(Taking(), add=added.append)
    async with doing(exchange.serve(Lists(*frames(b"everything")))):
        first = await begins(exchange, entry_reader, added)
        entry_reader.offers.append((Offer("me", "", 0.0), 0.0))  # the answer to a resync: nothing was used in these seconds
        entry_reader.offers.append((Offer("me", key("everything"), 0.0, first=True), 2.0))
        exchange.read(to_end=True)
        assert await first is not None


async def test_what_was_fetched_is_taken_in_although_the_store_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    seen = Taking()
    exchange, entry_reader = exchange_of(seen)
    exchange.started()
    entry_reader.offers.append((Offer("me", key("a"), 0.0), 1.0))
    lists = Lists(*frames(b"x"))
    async with doing(exchange.apply()):
        async with doing(exchange.serve(lists)):
            await eventually(lambda: lists.deleted == [key("a")])
        entry_reader.offers.append((Offer("me", key("b"), 0.0), 2.0))
        async with doing(exchange.serve(lists)):  # the next connection
            await asyncio.sleep(0.05)
            assert lists.deleted == [key("a")], "the next one stays in the store while one is being taken in"
            seen.may.set()
            await eventually(lambda: [each.at for each in seen.taken] == [1.0, 2.0])
    assert not caplog.records


async def test_one_that_has_expired_is_not_called_garbage(caplog: pytest.LogCaptureFixture) -> None:
    exchange, entry_reader = exchange_of(Taking())
    exchange.started()
    entry_reader.offers.append((Offer("me", key("a"), 0.0), 1.0))
    async with doing(exchange.serve(Lists())):
        await eventually(lambda: caplog.messages == ["a snapshot of another gateway is missing"])
    assert entry_reader.offers.maxlen
    assert not entry_reader.offers


async def test_what_is_wanted_begins_at_a_moment_however_long_it_waits() -> None:
    now, seen = 100.0, Taking()
    exchange, entry_reader = exchange_of(seen, lambda: now)
    exchange.offer_to_all(90.0)
    entry_reader.wants.append(("other", -math.inf))
    now = 160.0
    async with doing(exchange.serve(Lists())):
        await eventually(lambda: len(seen.asked) == 2)
    assert seen.asked == [70.0 + MARGIN_S, math.inf]


async def test_a_snapshot_that_is_put_only_in_part_has_an_end() -> None:
    """The key expires from its first, small element on."""
    calls: list[tuple[str, int]] = []

    class Client:
        async def rpush(self, _key: str, *values: bytes) -> None:
            calls.append(("rpush", sum(map(len, values))))

        async def expire(self, _key: str, seconds: int) -> None:
            calls.append(("expire", seconds))

    await offers.put(Client(), PREFIX, Snapshot(Header("1/256", {}), [b"x" * 100], 1.0))
    head, chunk, end = map(len, frames(b"x" * 100))
    assert calls == [("rpush", head), ("expire", offers.KEEP_S), ("rpush", chunk + end), ("expire", offers.KEEP_S)]


async def test_a_list_that_lacks_its_end_is_no_snapshot() -> None:
    with pytest.raises(KnowledgeError, match="cut off"):
        await offers.get(Lists(*frames(b"x")[:-1]), PREFIX, f"{PREFIX}snapshot:a", 1.0)


async def test_an_offer_is_taken_once_however_often_it_comes() -> None:
    seen = Taking()
    seen.may.set()
    exchange, entry_reader = exchange_of(seen)
    exchange.started()
    lists = Lists(*frames(b"x"))
    async with doing(exchange.serve(lists), exchange.apply()):
        for _ in range(3):
            entry_reader.offers.extend([(Offer("", key("a"), 0.0), 1.0)] * 5)
            exchange.read(to_end=True)
            await eventually(lambda: not entry_reader.offers)
    assert len(seen.taken) == 1


async def test_who_asks_for_snapshots_again_and_again_fills_no_store(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0

    class Full(Taking):
        async def collect(self, since_s: float = math.inf, most_bytes: int = 0) -> Snapshot | None:
            return Snapshot(Header("1/256", {}), [bytes(1 << 20)] * 200, now)

    class Client:
        pushed = 0

        async def rpush(self, _key: str, *values: bytes) -> None:
            self.pushed += sum(map(len, values))

        async def expire(self, _key: str, _seconds: int) -> None:
            """It will be gone."""

    client, added = Client(), list[Kind]()
    exchange, entry_reader = exchange_of(Full(), lambda: now, added.append)
    entry_reader.wants.extend((f"gateway-{number}", 0.0) for number in range(10))
    with caplog.at_level(logging.INFO):
        async with doing(exchange.serve(client)):
            await eventually(lambda: len(added) == 10)
            assert client.pushed < MAX_STORED_BYTES + (201 << 20)
            assert [item.key != "" for item in added if isinstance(item, Offer)] == [True] * 3 + [False] * 7, "all are answered"
            now = offers.KEEP_S + 1.0
            entry_reader.wants.append(("later", 0.0))
            exchange.read(to_end=True)
            await eventually(lambda: len(added) == 11)
    assert isinstance(added[-1], Offer)
    assert added[-1].key
