"""Costs of the exchange between gateways: for a gateway that follows the decisions of others, and for the store.

Both are measured without requests: a gateway that applies one decision of another gateway (an entry of the stream, decoded,
checked, translated and applied to a router), and a real server that sends an entry to many readers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fleet.stage import Store
from bench.measure.ports import free_ports
from gateway.cluster.messages import EventBatch
from gateway.cluster.replication import Replicator, Subscriber
from gateway.features.sharing.clock import StoreClock
from gateway.features.sharing.entry_reader import EntryReader
from gateway.features.sharing.messages import (
    ENVELOPE_FIELD,
    FORMAT_FIELD,
    GATEWAY_FIELD,
    VERSION,
    VERSION_FIELD,
    Envelope,
    encode_envelope,
)
from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.sharing.outbox import Outbox
from gateway.features.snapshots.snapshot import Snapshot
from gateway.features.table import new_metrics
from router import Replica, Router
from router.events import BookingClosed, BookingFirstToken, BookingOpened, Event, encode
from router.types import KEY_BYTES

FORMAT = "format"
BLOCK_TOKENS = 128  # about those of the default routing.block_bytes
NEW_BLOCKS = 10  # of a prompt; the rest is held
MEMORY = 256 << 20
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """The messages about one request (booked, first token, end), with a prompt of this many blocks."""

    blocks: int

    def events(self, number: int, head: bytes, replica: str, now: float) -> list[Event]:
        keys = head[: (self.blocks - NEW_BLOCKS) * KEY_BYTES] + os.urandom(NEW_BLOCKS * KEY_BYTES)
        tokens = self.blocks * BLOCK_TOKENS
        units, held, new = tokens * 4, self.blocks - NEW_BLOCKS, NEW_BLOCKS * BLOCK_TOKENS
        opened = BookingOpened(
            number, keys, units, BLOCK_TOKENS * 4, "model", 0, 0, number, (), replica, held, tokens, new, now, False, 0, 0
        )
        return [opened, BookingFirstToken(number, now), BookingClosed(number, True, tokens, tokens - new, now, True, True)]

    @property
    def bytes(self) -> int:
        return len(encode(self.events(1000, os.urandom(self.blocks * KEY_BYTES), "replica-123", time.monotonic())))


@dataclass(slots=True)
class Follower:
    """A gateway's router, and the code between the stream and it: the `Routers` of the incoming entries, their learner, and the
    transport of its replicator, all in one process.
    """

    replicas: int
    unsent: int = 0
    incoming: EntryReader = field(init=False)
    _subscriber: Subscriber = field(init=False)

    def __post_init__(self) -> None:
        router = Router(policy="cost", ttl_s=600.0, memory_bytes=MEMORY, chance=random.Random(1))
        for number in range(self.replicas):
            router.add(Replica(f"replica-{number}", 1_000_000))
        clock = time.monotonic
        replicator = Replicator(
            router, self, clock=clock, call_later=lambda _after, _call: None, published=lambda: None, learner=self
        )
        replicator.start()
        self.incoming = EntryReader(
            me="me",
            format=FORMAT,
            routers=self,
            outbox=Outbox(clock),
            store_clock=StoreClock(),
            clock=clock,
            metrics=new_metrics().of(SharingMetrics),
        )

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def receive(self, source: int, batch: EventBatch) -> None:
        self._subscriber.receive(source, batch)

    def leave(self, source: int) -> None:
        self._subscriber.leave(source)

    def join(self) -> None:
        """Nothing is open here."""

    def publish(self, batch: EventBatch) -> None:
        """It decides nothing itself."""

    def snapshot(self, batch: EventBatch) -> None:
        """It decides nothing itself."""

    def followed(self, lost: list[str], age_s: float | None) -> None:
        """Nobody asks for it."""

    def failing(self, replica: str) -> None:
        """Nothing is probed here."""

    def unknown(self, replica: str) -> None:
        """All have the same names."""

    async def collect(self, since_s: float = 0.0, most_bytes: int = 0) -> Snapshot | None:
        return None

    async def restore(self, snapshot: Snapshot) -> None:
        """None is offered."""


def following(replicas: int, decision: Decision, each: int, *, envelopes: int) -> float:
    """Seconds of a decision, with `each` of them in an envelope: the least of some rounds."""
    head = os.urandom(decision.blocks * KEY_BYTES)
    times = []
    for number in range(ROUNDS):
        follower = Follower(replicas)
        entries = list(_entries(replicas, decision, head, each, envelopes))
        begun = time.perf_counter()
        for at, entry in enumerate(entries):
            for _ in follower.incoming.entry(1000.0 + number + at / 1000, entry):
                pass
        times.append((time.perf_counter() - begun) / envelopes / each)
    return min(times)


def _entries(replicas: int, decision: Decision, head: bytes, each: int, envelopes: int) -> Iterator[Mapping[bytes, bytes]]:
    booked = 0
    for seq in range(1, envelopes + 1):
        events: list[Event] = []
        now = time.monotonic()
        for _ in range(each):
            booked += 1
            events += decision.events(booked, head, f"replica-{booked % replicas}", now)
        envelope = Envelope(seq, now, "host", ((1, EventBatch(now, encode(events))),))
        yield {
            VERSION_FIELD: VERSION,
            FORMAT_FIELD: FORMAT.encode(),
            GATEWAY_FIELD: b"other",
            ENVELOPE_FIELD: encode_envelope(envelope),
        }


async def handing_out(readers: int, burst: int, entry_bytes: int, folder: Path, *, rounds: int) -> float:
    """The store's CPU, in seconds, for `burst` entries that are written, and then read by each reader with one command."""
    import redis.asyncio as redis

    store = Store(free_ports(1)[0], folder)
    store.start()
    clients = [redis.Redis(port=store.port) for _ in range(readers + 1)]
    value = os.urandom(entry_bytes)
    try:
        await _until_it_answers(clients[0])
        before, at = store.cpu_s, b"0"
        for _ in range(rounds):
            pipe = clients[0].pipeline(transaction=False)
            for _ in range(burst):
                pipe.xadd("log", {"e": value}, maxlen=1000, approximate=True)
            entries = await pipe.execute()
            await asyncio.gather(*(client.xread({"log": at}, count=burst) for client in clients[1:]))
            at = entries[-1]
        return (store.cpu_s - before) / rounds
    finally:
        for client in clients:
            await client.aclose()
        store.kill()


async def _until_it_answers(client: Any) -> None:
    from redis.exceptions import RedisError

    async with asyncio.timeout(30):
        while True:
            try:
                await client.ping()
            except RedisError:
                await asyncio.sleep(0.05)
            else:
                return
