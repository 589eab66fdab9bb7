"""Snapshots of other gateways: what is read of them at once, and what becomes of those that cannot be had."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis.exceptions import TimeoutError as Late

from gateway.cluster.snapshots.snapshot import MAX_CHUNK_BYTES, Header, KnowledgeError, encode_header
from gateway.cluster.store import offers
from gateway.cluster.store.clock import StoreClock
from gateway.cluster.store.incoming import Incoming
from gateway.cluster.store.messages import Item, Offer
from gateway.cluster.store.outbox import Outbox
from gateway.cluster.store.snapshots import TRIES, SnapshotExchange
from gateway.telemetry.metrics import Metrics
from tests.gateway.cluster.store.test_slow_store import Seen
from tests.gateway.conftest import eventually

PREFIX = "warmroute:{default}:"
HEADER = encode_header(Header("1/256/64", {}))


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
    short = Lists(HEADER, *[b"x" * 1000] * 500)
    found = await offers.get(short, PREFIX, f"{PREFIX}snapshot:a", 1.0)
    assert len(found.chunks) == 500
    assert max(short.asked) == offers.AT_ONCE
    long = Lists(HEADER, *[b"x" * (2 << 20)] * 5)
    assert len((await offers.get(long, PREFIX, f"{PREFIX}snapshot:a", 1.0)).chunks) == 5
    assert long.asked == [1, 2, 1, 1, 1, 1]
    hostile = Lists(HEADER, *[b"x" * (MAX_CHUNK_BYTES + 1)] * 64)
    with pytest.raises(KnowledgeError, match="too large"):
        await offers.get(hostile, PREFIX, f"{PREFIX}snapshot:a", 1.0)
    assert hostile.asked == [1, 2], "two of them at most are read before they are refused"


def exchange_of(seen: Seen) -> tuple[SnapshotExchange, Incoming]:
    metrics = Metrics()
    incoming = Incoming(
        me="me",
        format="1/256/64",
        routers=seen,
        outbox=Outbox(lambda: 0.0),
        store_clock=StoreClock(),
        clock=lambda: 0.0,
        metrics=metrics,
    )
    added: list[Item] = []
    made = SnapshotExchange(
        incoming=incoming, routers=seen, metrics=metrics, clock=lambda: 0.0, prefix=PREFIX, add=added.append
    )
    return made, incoming


async def test_one_that_loses_the_store_each_time_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    exchange, incoming = exchange_of(seen)
    incoming.offers.append((Offer("me", f"{PREFIX}snapshot:bad", 0.0), 0.0))
    incoming.offers.append((Offer("me", f"{PREFIX}snapshot:good", 0.0), 0.0))
    for _ in range(TRIES):  # the link connects anew each time
        with pytest.raises(Late):
            await exchange.serve(Lists(late=True))
    good = Lists(HEADER)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(exchange.serve(good))
        await eventually(lambda: good.deleted == [f"{PREFIX}snapshot:good"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [record.message for record in caplog.records] == ["a snapshot was not exchanged"]


async def test_only_keys_of_snapshots_are_removed() -> None:
    lists = Lists()
    await offers.remove(lists, PREFIX, "somebody:else")
    await offers.remove(lists, PREFIX, f"{PREFIX}log")
    assert lists.deleted == []
