"""Routers in one process that follow each other over a transport of lists: no sockets, no event loop, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gateway.cluster.messages import EventBatch
from gateway.cluster.replication import (
    MAX_UNKNOWN,
    RESYNC_S,
    UNKNOWN_S,
    UNSENT_BYTES,
    Replicator,
    Subscriber,
    UnknownReplicas,
)
from gateway.telemetry.metrics import Metrics
from router import Outcome, Prompt, Replica, Router, text_keys
from router.events import BookingOpened, decode


class Store:
    """Carries every batch to all other transports at once, and keeps them."""

    def __init__(self) -> None:
        self.transports: list[Transport] = []
        self.batches: list[tuple[int, EventBatch]] = []


class Transport:
    """One router's way into the store. unsent: what it claims to be waiting."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.unsent = 0
        self.subscriber: Subscriber | None = None
        self.source = len(store.transports) + 1
        for other in self.others:
            other.join()
        store.transports.append(self)

    @property
    def others(self) -> list[Subscriber]:
        return [one.subscriber for one in self.store.transports if one is not self and one.subscriber]

    def publish(self, batch: EventBatch) -> None:
        self.store.batches.append((self.source, batch))
        for other in self.others:
            other.receive(self.source, batch)

    def snapshot(self, batch: EventBatch) -> None:
        for other in self.others:
            other.leave(self.source)
            other.receive(self.source, batch)

    def subscribe(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber

    def close(self) -> None:
        for other in self.others:
            other.leave(self.source)


@dataclass
class Gateway:
    """A router and its replicator, with a clock and timers that are moved by hand."""

    transport: Transport
    now: float = 0.0
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ages: list[float | None] = field(default_factory=list)
    doubted: list[str] = field(default_factory=list)
    unknown_replicas: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.router = Router(policy="cost", ttl_s=100.0, memory_bytes=1 << 20, chance=random.Random(1))
        for name in ("r1", "r2"):
            self.router.add(Replica(name))
        self.replicator = Replicator(
            self.router,
            self.transport,
            clock=lambda: self.now,
            call_later=lambda seconds, call: self.timers.append((seconds, call)),
            published=lambda: None,
            learner=self,
        )
        self.replicator.start()

    def failing(self, replica: str) -> None:
        self.doubted.append(replica)

    def unknown(self, replica: str) -> None:
        self.unknown_replicas.append(replica)

    def followed(self, lost: list[str], age_s: float | None) -> None:
        self.lost += lost
        self.ages.append(age_s)

    def run_timers(self) -> None:
        timers, self.timers = self.timers, []
        for _, call in timers:
            call()

    def inflight(self, name: str) -> int:
        return self.router.ledger.of(name).inflight


@dataclass
class Ages:
    """Keeps the ages of batches."""

    ages: list[float | None]

    def followed(self, _lost: list[str], age_s: float | None) -> None:
        self.ages.append(age_s)

    def failing(self, _replica: str) -> None:
        raise AssertionError

    def unknown(self, _replica: str) -> None:
        raise AssertionError


def two() -> tuple[Gateway, Gateway]:
    store = Store()
    return Gateway(Transport(store)), Gateway(Transport(store))


def prompt(text: str) -> Prompt:
    return Prompt(text_keys(text.encode(), 1, 7), len(text), 1, "")


def test_what_one_books_the_other_knows() -> None:
    one, other = two()
    booking = one.router.choose(prompt("a long conversation"), ["r1", "r2"], 1.0)
    name = booking.chosen.replica
    assert other.inflight(name) == 0, "it goes in batches"
    one.run_timers()
    assert (other.inflight(name), other.router.ledger.of(name).remote_inflight) == (1, 1)
    other.replicator.follower.check()
    booking.first_token(2.0)
    booking.close(Outcome(True), 3.0)
    one.run_timers()
    assert other.inflight(name) == 0
    again = other.router.choose(prompt("a long conversation, and on"), ["r1", "r2"], 4.0)
    assert (again.chosen.replica, again.decision.reason) == (name, "warm")
    other.run_timers()
    assert one.inflight(name) == 1, "and so the other way round"
    assert one.router.trie.held() == other.router.trie.held()


def test_a_batch_is_published_once_for_the_events_of_a_moment() -> None:
    one, other = two()
    for number in range(5):
        one.router.choose(prompt(f"{number}"), ["r1"], 1.0)
    assert len(one.timers) == 1
    one.now, other.now = 1.5, 2.0
    one.run_timers()
    assert [len(decode(batch.events)) for _, batch in one.transport.store.batches] == [5]
    assert other.ages == [2.0], "since the first event was booked, when the clock stood at zero"
    one.replicator.flush()
    assert len(one.transport.store.batches) == 1, "nothing is published of nothing"


def test_a_router_that_joins_gets_what_is_open_and_one_that_leaves_has_nothing_open() -> None:
    one, other = two()
    one.router.choose(prompt("abc"), ["r1"], 1.0)
    one.run_timers()
    late = Transport(one.transport.store)
    joined = Gateway(late)
    for each in (one, other):
        assert each.transport.subscriber
        each.transport.subscriber.join()
    assert (other.inflight("r1"), joined.inflight("r1")) == (1, 1), "the other one counts it once"
    one.transport.close()
    assert (other.inflight("r1"), joined.inflight("r1")) == (0, 0)


def test_bookings_on_replicas_that_are_unknown_here_are_named() -> None:
    """Names that differ would make the sharing useless without a sign."""
    one, other = two()
    one.router.add(Replica("elsewhere"))
    booking = one.router.choose(prompt("a long conversation"), ["elsewhere"], 1.0)
    one.run_timers()
    booking.first_token(2.0)
    booking.close(Outcome(True), 3.0)
    one.run_timers()
    assert other.unknown_replicas == ["elsewhere"]
    assert (other.inflight("elsewhere"), other.router.trie.blocks) == (0, 0)


def test_a_replica_that_stays_unknown_is_written_to_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    router, metrics = Router(policy="cost", ttl_s=1.0, memory_bytes=1, chance=random.Random(1)), Metrics()
    router.add(Replica("vllm-0"))
    replicas = UnknownReplicas(router, metrics)
    for now in map(float, range(0, int(UNKNOWN_S) * 3, 10)):
        replicas.booked("10.0.0.7:8000", now)
        if now % 120 == 0:  # a replica that comes or goes, of which others know a while longer
            replicas.booked("comes-and-goes", now)
    assert [(record.replica, record.known) for record in caplog.records] == [("10.0.0.7:8000", "vllm-0")]  # type: ignore[attr-defined]
    assert metrics.sharing_unknown_replicas.values[()] == 18 + 2
    for number in range(2 * MAX_UNKNOWN):
        replicas.booked(f"r{number}", 0.0)
    assert repr(replicas).count(",") < MAX_UNKNOWN


def test_batches_wait_until_the_router_is_ready_and_are_then_applied_in_order() -> None:
    store = Store()
    one, transport = Gateway(Transport(store)), Transport(store)
    followed: list[float | None] = []
    router = Router(policy="cost", ttl_s=100.0, memory_bytes=1 << 20, chance=random.Random(1))
    replicator = Replicator(
        router,
        transport,
        clock=lambda: 0.0,
        call_later=lambda _seconds, _call: None,
        published=lambda: None,
        learner=Ages(followed),
    )
    one.router.choose(prompt("abc"), ["r1"], 1.0)
    one.run_timers()
    gone = one.router.choose(prompt("xyz"), ["r2"], 1.0)
    one.run_timers()
    gone.close(Outcome(ok=False), 2.0)
    one.run_timers()
    assert followed == []
    for name in ("r1", "r2"):  # commands of operators may add replicas before it starts
        router.add(Replica(name))
    replicator.start()
    assert followed == [None, None, None], "their age would be that of the start"
    assert [router.ledger.of(name).inflight for name in ("r1", "r2")] == [1, 0]


def test_while_the_transport_is_full_events_are_dropped_and_a_snapshot_replaces_them(caplog: pytest.LogCaptureFixture) -> None:
    one, other = two()
    before = one.router.choose(prompt("abc"), ["r1"], 1.0)
    one.run_timers()
    one.transport.unsent = UNSENT_BYTES + 1
    before.close(Outcome(True), 2.0)
    one.router.choose(prompt("xyz"), ["r2"], 2.0)
    one.run_timers()
    assert "does not take routing events" in caplog.text
    assert [seconds for seconds, _ in one.timers] == [RESYNC_S]
    one.run_timers()
    assert (other.inflight("r1"), other.inflight("r2")) == (1, 0), "it knows no better"
    one.transport.unsent = 0
    one.run_timers()
    assert (other.inflight("r1"), other.inflight("r2")) == (0, 1)
    other.replicator.follower.check()


def test_events_since_the_last_batch_are_not_lost_with_the_dropped_ones() -> None:
    """What ended since then is in no snapshot of open bookings: outcomes, rents, objects."""
    one, other = two()
    one.transport.unsent = UNSENT_BYTES + 1
    one.router.choose(prompt("dropped"), ["r1"], 1.0)
    one.run_timers()
    one.transport.unsent = 0
    ended, stays = (one.router.choose(prompt(text), ["r2"], 2.0) for text in ("abc" * 100, "xyz" * 100))
    ended.close(Outcome(True, prompt_tokens=75, cached_tokens=0), 3.0)
    stays.first_token(3.0)
    one.router.stored(7, "r2", "m", 3.0)
    one.run_timers()
    assert other.router.objects.find(7, 4.0) == ("r2", "m")
    assert other.router.holder(prompt("abc" * 100), ["r1", "r2"], 4.0) == "r2"
    assert (other.inflight("r1"), other.inflight("r2")) == (1, 1)
    other.replicator.follower.check()


def test_events_that_do_not_decode_forget_what_their_router_has_open(caplog: pytest.LogCaptureFixture) -> None:
    one, other = two()
    one.router.choose(prompt("abc"), ["r1"], 1.0)
    one.run_timers()
    one.transport.publish(EventBatch(2.0, b"junk"))
    assert other.inflight("r1") == 0
    assert "do not decode" in caplog.text
    other.replicator.follower.check()
    one.router.choose(prompt("xyz"), ["r2"], 3.0)
    one.run_timers()
    assert other.inflight("r2") == 1, "the next ones do"
    assert isinstance(decode(one.transport.store.batches[-1][1].events)[0], BookingOpened)


def test_many_open_bookings_are_published_in_pieces() -> None:
    """A piece is read at once, and a store has a bound for it."""
    one, other = two()
    long = "x" * 80_000  # 8 bytes of keys for each byte
    for number in range(50):
        one.router.choose(prompt(f"{number:03}{long}"), ["r1"], 1.0)
    one.run_timers()
    batches = one.transport.store.batches
    assert len(batches) > 10
    before = len(batches)
    one.replicator.join()
    assert len(batches) == 2 * before
    assert max(len(batch.events) for _, batch in batches) < 1 << 20
    assert other.inflight("r1") == 50


def test_many_open_bookings_after_a_full_transport_are_all_published() -> None:
    one, other = two()
    one.transport.unsent = UNSENT_BYTES + 1
    for number in range(50):
        one.router.choose(prompt(f"{number:03}{'x' * 80_000}"), ["r1"], 1.0)
    one.run_timers()
    assert other.inflight("r1") == 0, "they are dropped"
    one.transport.unsent = 0
    one.run_timers()
    assert other.inflight("r1") == 50
    other.replicator.follower.check()
