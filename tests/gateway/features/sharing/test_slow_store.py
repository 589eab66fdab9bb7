"""A link whose store is slow: what does not come in time is asked for in smaller pieces, and at last passed over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import TimeoutError as Late

from gateway.cluster.messages import EventBatch
from gateway.features.sharing.link import Link
from gateway.features.sharing.messages import VERSION, Envelope, encode_envelope
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.position import MAX_ENTRIES_PER_READ
from gateway.features.sharing.section import SharingConfig
from gateway.features.snapshots.snapshot import Snapshot
from gateway.features.table import new_metrics
from router.events import CacheLost, encode
from tests.gateway.conftest import eventually

FORMAT = "1/256"


class SlowStore:
    """The commands of a client, over one stream in memory. A reply of more than `most` bytes does not come in time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        self.counts: list[int] = []
        self.added = asyncio.Event()

    def put(self, seq: int, payload: bytes, gateway: bytes = b"other") -> None:
        envelope = Envelope(seq, time.monotonic(), "host", ((1, EventBatch(0.0, payload)),))
        self._add({b"v": VERSION, b"f": FORMAT.encode(), b"g": gateway, b"e": encode_envelope(envelope)})

    def _add(self, fields: dict[bytes, bytes]) -> bytes:
        entry = b"%d-%d" % (time.time() * 1000, len(self.entries))
        self.entries.append((entry, fields))
        self.added.set()
        return entry

    async def time(self) -> tuple[int, int]:
        return int(time.time()), 0

    async def xrevrange(self, _name: str, count: int) -> list[Any]:
        return self.entries[-count:]

    async def xadd(self, _name: str, fields: dict[bytes, bytes], **_more: Any) -> bytes:
        return self._add(fields)

    async def xread(self, streams: dict[str, bytes], count: int, block: int) -> list[Any]:
        self.counts.append(count)
        (after,) = streams.values()
        while not (found := [each for each in self.entries if _order(each[0]) > _order(after)][:count]):
            self.added.clear()
            await self.added.wait()
        if sum(len(value) for _, fields in found for value in fields.values()) > self.most:
            raise Late("the answer took longer")
        return [(b"log", found)]

    async def expire(self, *_arguments: Any) -> None:
        """Nothing is forgotten here."""

    async def xtrim(self, *_arguments: Any, **_more: Any) -> None:
        """Nothing is forgotten here."""


def _order(entry: bytes) -> tuple[int, int]:
    first, _, second = entry.partition(b"-")
    return int(first), int(second)


class Seen:
    """The routers of the link's gateway."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def receive(self, source: int, _batch: EventBatch) -> None:
        self.received.append(source)

    def leave(self, source: int) -> None:
        """Nothing is open here."""

    def join(self) -> None:
        """Nothing is open here."""

    async def collect(self, since_s: float = 0.0, most_bytes: int = 0) -> Snapshot | None:
        return None

    async def restore(self, snapshot: Snapshot) -> None:
        """None is offered."""


@contextlib.asynccontextmanager
async def linked(store: SlowStore, seen: Seen) -> AsyncIterator[tuple[Link, SharingMetrics]]:
    @contextlib.asynccontextmanager
    async def connect(_sharing: SharingConfig) -> AsyncIterator[Any]:
        yield store

    metrics = new_metrics().of(SharingMetrics)
    link = Link(SharingConfig(url="redis://nowhere"), FORMAT, seen, metrics, connect=connect)
    task = asyncio.create_task(link.run())
    try:
        yield link, metrics
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_is_too_much_at_once_is_read_in_pieces() -> None:
    store, seen = SlowStore(most=20_000), Seen()
    for seq in range(1, 100):
        store.put(seq, encode([CacheLost("x" * 1000)]))
    async with linked(store, seen) as (_, metrics):
        await eventually(lambda: len(seen.received) == 99)
        assert metrics.resyncs.values.get((), 0) == 0
        assert store.counts[0] == MAX_ENTRIES_PER_READ
        assert min(store.counts) < 20
        await eventually(lambda: store.counts[-1] == MAX_ENTRIES_PER_READ)


async def test_a_connection_that_is_closed_during_the_goodbye_is_no_error() -> None:
    """As asyncio and redis-py say it."""

    class Closing(SlowStore):
        closed = False

        async def xadd(self, _name: str, fields: dict[bytes, bytes], **more: Any) -> bytes:
            if self.closed:
                raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
            return await super().xadd(_name, fields, **more)

    store = Closing(most=20_000)
    async with linked(store, Seen()) as (link, metrics):
        await eventually(lambda: metrics.up.values[()] == 1)
        store.closed = True
        await link.close()


async def test_an_entry_that_never_comes_in_time_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store, seen = SlowStore(most=20_000), Seen()
    with caplog.at_level(logging.INFO):
        async with linked(store, seen) as (_, metrics):
            await eventually(lambda: metrics.up.values[()] == 1)
            store.put(1, encode([CacheLost("x")]))
            await eventually(lambda: len(seen.received) == 1)
            store.put(2, encode([CacheLost("x" * 30_000)]))
            store.put(1, b"x" * 50_000, gateway=b"hostile")
            store.put(3, encode([CacheLost("x")]))
            await eventually(lambda: len(store.counts) > 8 and metrics.up.values[()] == 1)
            store.put(4, encode([CacheLost("x")]))
            await eventually(lambda: len(seen.received) >= 2)
            assert metrics.resyncs.values[()] == 1, "what was missed is asked for"
    assert len([record for record in caplog.records if record.message.startswith("the store is away")]) == 1


async def test_an_odd_reply_ends_sharing_only_until_the_store_is_well(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(SlowStore):
        odd = True

        async def xread(self, streams: dict[str, bytes], count: int, block: int) -> list[Any]:
            return [(b"log", [(b"abc", {})])] if self.odd else await super().xread(streams, count, block)

    store, seen = Odd(most=1 << 20), Seen()
    async with linked(store, seen) as (_, metrics):
        await eventually(lambda: metrics.errors.values[("garbage",)] > 1)
        store.odd = False
        store.put(1, encode([CacheLost("x")]))
        await eventually(lambda: len(seen.received) == 1)
    assert [record.exc_info for record in caplog.records] == [None], "one line, and no traceback"


async def test_a_stream_with_an_id_of_the_future_is_begun_anew() -> None:
    class Future(SlowStore):
        ahead_ms = 3_600_000

        def _add(self, fields: dict[bytes, bytes]) -> bytes:
            entry = b"%d-%d" % (time.time() * 1000 + self.ahead_ms, len(self.entries))
            self.entries.append((entry, fields))
            self.added.set()
            return entry

        async def delete(self, _key: str) -> None:
            self.entries.clear()
            self.ahead_ms = 0

    store, seen = Future(most=1 << 20), Seen()
    async with linked(store, seen) as (_, metrics):
        await eventually(lambda: store.ahead_ms == 0)
        await eventually(lambda: metrics.up.values[()] == 1)
        store.put(1, encode([CacheLost("x")]))
        await eventually(lambda: len(seen.received) == 1)


@pytest.mark.parametrize("within", ["connect", "command"])
async def test_a_cancellation_that_the_library_makes_ends_no_sharing(within: str, caplog: pytest.LogCaptureFixture) -> None:
    """redis-py has a CancelledError for who has cancelled nothing, now and then."""
    store, made = SlowStore(most=1 << 20), list[int]()

    class Cancelled(SlowStore):
        async def xread(self, streams: dict[str, bytes], count: int, block: int) -> list[Any]:
            raise asyncio.CancelledError

    @contextlib.asynccontextmanager
    async def connect(_sharing: SharingConfig) -> AsyncIterator[Any]:
        made.append(1)
        if len(made) == 1 and within == "connect":
            raise asyncio.CancelledError
        yield Cancelled(most=1) if len(made) == 1 else store

    metrics = new_metrics().of(SharingMetrics)
    link = Link(SharingConfig(url="redis://nowhere"), FORMAT, Seen(), metrics, connect=connect)
    task = asyncio.create_task(link.run())
    await eventually(lambda: metrics.up.values[()] == 1)
    assert len(made) == 2
    assert metrics.errors.values[("other",)] == 1
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
