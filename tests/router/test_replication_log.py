"""Routers that follow each other: what one does the other does too, and whatever is lost or late breaks nothing.

Events go through their encoded form, as between processes.
"""

from __future__ import annotations

import os
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from router import Booking, Outcome, Prompt, Replica, Router
from router.events import BookingClosed, BookingMoved, BookingOpened, CacheLost, Event, decode, encode
from router.follower import MAX_MOVES, Follower
from router.replication_log import MAX_BLOCKS, Journal
from router.types import KEY_BYTES
from tests.router.test_router_machine import NAMES, RouterMachine, prompts, shown
from tests.support.machines import STEPS, CountedMachine, steps_of
from tests.support.strategies import keys_of, prompt_of, replicas


def router_of(**options: Any) -> Router:
    router = Router(**{"policy": "cost", "ttl_s": 10, "memory_bytes": 1 << 20, "chance": random.Random(1)} | options)
    for name in NAMES:
        router.add(Replica(name, None))
    return router


def recording() -> tuple[Router, Journal]:
    """A router that keeps a journal."""
    journal = Journal(lambda: None)
    return router_of(journal=journal), journal


def sent(journal: Journal) -> list[Event]:
    """The journal's events as another process receives them."""
    return decode(encode(journal.take()))


class FollowedRouter(RouterMachine):
    """All that may happen to a router happens; another that only follows its journal knows the same after each step."""

    @initialize(memory=st.sampled_from([3000, 30_000, 1 << 20]), capacity=st.none() | st.integers(1, 10))
    def start(self, memory: int, capacity: int | None) -> None:  # type: ignore[override]
        self.other = Router(policy="cost", ttl_s=10, memory_bytes=memory, chance=random.Random(2))
        self.follower = Follower(self.other)
        super().start("cost", memory, capacity)
        self.journal = self.router.journal = Journal(self.follow)

    def follow(self) -> None:
        self.settle()  # what time alone changes depends on the speed that is believed at that moment
        self.follower.apply(1, sent(self.journal))

    def settle(self) -> None:
        for router in (self.router, self.other):
            for name in NAMES:
                router.ledger.of(name).advance(self.now)

    @rule(name=replicas, capacity=st.none() | st.integers(1, 10))
    def join(self, name: str, capacity: int | None) -> None:
        super().join(name, capacity)
        self.other.add(Replica(name, capacity))

    @rule(name=replicas)
    def leave(self, name: str) -> None:
        super().leave(name)
        self.other.remove(name)

    @rule(name=replicas)
    def restart(self, name: str) -> None:
        super().restart(name)
        self.other.restarted(name)

    @precondition(lambda self: self.bookings and self.router.replicas)
    @rule(data=st.data(), names=st.lists(replicas, min_size=1, unique=True))
    def move(self, data: st.DataObject, names: list[str]) -> None:
        """Not to replicas that have left: nobody does, and a follower that is behind takes it for a failure."""
        super().move(data, [name for name in names if name in self.router.replicas] or list(self.router.replicas))

    @rule()
    def sweep(self) -> None:
        super().sweep()
        while self.other.sweep(self.now):
            self.other.check()

    @rule()
    def prove(self) -> None:
        """No lines: a follower credits a request when it is booked, and its router when it is sent."""

    @invariant()
    def the_other_knows_the_same(self) -> None:
        self.settle()
        self.follower.check()
        self.other.check()
        assert shown(self.other) == shown(self.router)


def test_a_follower_knows_what_the_router_knows() -> None:
    assert steps_of(FollowedRouter, examples=280, steps=50) >= STEPS


class TwoRouters(CountedMachine):
    """Both decide, and receive each other's events late. Whatever has arrived, the counts are right; at the end, equal."""

    @initialize()
    def start(self) -> None:
        self.routers = [router_of(), router_of()]
        self.followers = [Follower(router) for router in self.routers]
        self.ways: list[deque[Event]] = [deque(), deque()]  # to whom
        self.journals: list[tuple[Journal, deque[Event]]] = []
        for router, way in zip(self.routers, reversed(self.ways), strict=True):
            router.journal = journal = Journal(lambda: None)
            self.journals.append((journal, way))
        self.bookings: list[Booking] = []
        self.now = 0.0

    def send_all(self) -> None:
        for journal, way in self.journals:
            way.extend(sent(journal))

    @rule(who=st.integers(0, 1), prompt=prompts, silent=st.booleans())
    def choose(self, who: int, prompt: Prompt, silent: bool) -> None:
        router = self.routers[who]
        self.bookings.append(router.choose(prompt, list(router.replicas), self.now, silent=silent))

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), what=st.sampled_from(["first token", "move", "close", "close"]), ok=st.booleans())
    def go_on(self, data: st.DataObject, what: str, ok: bool) -> None:
        booking = data.draw(st.sampled_from(self.bookings))
        if what == "first token":
            booking.first_token(self.now)
        elif what == "move":
            booking.move(NAMES[:2], self.now)
        else:
            self.bookings.remove(booking)
            booking.close(Outcome(ok, 12, data.draw(st.sampled_from([0, 5, 12]))), self.now)

    @rule(who=st.integers(0, 1), events=st.integers(1, 5))
    def receive(self, who: int, events: int) -> None:
        self.send_all()
        way = self.ways[who]
        self.followers[who].apply(2 - who, [way.popleft() for _ in range(min(events, len(way)))])

    @rule(seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def sound(self) -> None:
        for router, follower in zip(self.routers, self.followers, strict=True):
            router.check()
            follower.check()

    def teardown(self) -> None:
        if not hasattr(self, "routers"):
            return
        for who in (0, 1):
            self.receive(who, 10**6)
        inflight = [{name: router.ledger.of(name).inflight for name in NAMES} for router in self.routers]
        assert inflight[0] == inflight[1]
        assert sum(inflight[0].values()) == len(self.bookings)
        for booking in self.bookings:
            booking.close(Outcome(True), self.now)
        for who in (0, 1):
            self.receive(who, 10**6)
            assert self.routers[who].ledger.open_leases == 0


def test_two_that_follow_each_other_agree_in_the_end() -> None:
    assert steps_of(TwoRouters, examples=200, steps=50) >= STEPS // 2


def test_a_journal_wakes_once_for_what_is_then_taken_together() -> None:
    woken: list[int] = []
    journal = Journal(lambda: woken.append(len(journal.events)))
    router = router_of(journal=journal)
    for turn in (1, 2):
        router.choose(prompt_of(b"abc"), ["r1"], 0.0).first_token(1.0)
        assert woken == [1] * turn, "at the first event, which is there"
        assert len(journal.take()) == 2
        assert len(journal.open) == turn
    assert journal.take() == []


def test_events_of_an_unknown_booking_are_ignored() -> None:
    (router, journal), other = recording(), router_of()
    booking = router.choose(prompt_of(b"abc"), ["r1"], 0.0)
    booking.first_token(0.5)
    booking.move(["r2"], 1.0)
    booking.close(Outcome(True), 2.0)
    Follower(other).apply(1, journal.take()[1:])
    assert other.ledger.open_leases == 0
    assert other.trie.blocks == 0


def test_events_about_an_unknown_replica_are_ignored() -> None:
    (router, journal), other = recording(), router_of()
    follower = Follower(other)
    router.choose(prompt_of(b"abc"), ["r1"], 0.0)
    moved = router.choose(prompt_of(b"xyz"), ["r2"], 0.0)
    moved.move(["r3"], 1.0)
    other.remove("r1")
    other.remove("r3")
    follower.apply(1, journal.take())
    assert other.ledger.open_leases == 0
    assert other.trie.held() == {"r2": 0}, "what failed there is not held there"
    follower.check()


def test_a_router_that_has_ended_has_nothing_open_and_what_was_prefilled_is_held() -> None:
    (router, journal), other = recording(), router_of()
    follower = Follower(other)
    router.choose(prompt_of(b"abc"), ["r1"], 0.0).first_token(1.0)
    router.choose(prompt_of(b"xyz"), ["r2"], 0.0)
    follower.apply(1, journal.take())
    assert other.ledger.open_leases == 2
    follower.leave(1, 2.0)
    follower.leave(7, 2.0)
    assert other.ledger.open_leases == 0
    assert other.trie.held() == {"r1": 3, "r2": 0, "r3": 0}
    follower.check()


def test_what_is_open_is_sent_again_to_late_followers_and_counted_once() -> None:
    (router, journal), early, late = recording(), router_of(), router_of()
    followers = [Follower(early), Follower(late)]
    router.choose(prompt_of(b"over"), ["r1"], 0.0).close(Outcome(True), 0.5)
    prompt = prompt_of(b"abc")
    prompt.sequences = 3
    booking = router.choose(prompt, ["r1"], 0.0)
    booking.move(["r2"], 1.0)
    followers[0].apply(1, journal.take())
    (again,) = journal.still_open()
    assert isinstance(again, BookingOpened)
    assert again.silent, "it teaches nothing"
    for follower, other in zip(followers, (early, late), strict=True):
        follower.apply(1, [again])
        follower.apply(1, [again])
        follower.check()
        assert [other.ledger.of(name).remote_inflight for name in NAMES] == [0, 1, 0]
        assert [other.ledger.of(name).sequences for name in NAMES] == [0, 3, 0]
    booking.first_token(500.0)  # what it took is not known to who came late
    booking.close(Outcome(True, 3, 0), 600.0)
    assert journal.still_open() == []
    events = sent(journal)
    for follower in followers:
        follower.apply(1, events)
    assert [router.ledger.open_leases for router in (early, late)] == [0, 0]
    assert early.trie.held() == {"r1": 4, "r2": 3, "r3": 0}
    assert late.trie.held() == {"r1": 0, "r2": 3, "r3": 0}, "it never received what was over"


def test_what_each_of_three_routers_has_booked_adds_up_to_what_is_booked() -> None:
    """Each follows the others, so each knows all of it."""
    pairs = [recording() for _ in range(3)]
    routers = [router for router, _ in pairs]
    followers = [Follower(router) for router in routers]

    def exchange() -> None:
        for source, (_, journal) in enumerate(pairs):
            events = sent(journal)
            for number, follower in enumerate(followers):
                if number != source:
                    follower.apply(source, events)

    def add_up(now: float) -> tuple[int, int, int]:
        loads = [router.ledger.of("r1") for router in routers]
        assert len({(load.inflight, load.booked_tokens, load.remaining_tokens(now)) for load in loads}) == 1
        own = [(load.own_inflight, load.own_booked_tokens, load.own_remaining_tokens(now)) for load in loads]
        sums = tuple(map(sum, zip(*own, strict=True)))
        assert sums == (loads[0].inflight, loads[0].booked_tokens, loads[0].remaining_tokens(now))
        return own[0]

    bookings = []
    for number in range(4):
        bookings.append(routers[number % 3].choose(prompt_of(bytes([number]) * 9000), ["r1"], 0.0))
        exchange()
    assert add_up(0.0) == (2, 2 * bookings[0].lease.uncached_tokens, 2 * bookings[0].lease.uncached_tokens)
    assert add_up(0.1)[2] < add_up(0.1)[1], "the first router's prompt is being computed"
    bookings[0].first_token(1.0)
    bookings[1].move(["r2"], 1.0)
    exchange()
    assert add_up(1.1)[:2] == (2, bookings[3].lease.uncached_tokens)
    for booking in bookings:
        booking.close(Outcome(True), 2.0)
    exchange()
    assert add_up(2.0) == (0, 0, 0)


def test_what_a_replica_lost_is_lost_for_a_router_that_begins_later_and_kept_by_one_that_sees_for_itself() -> None:
    (router, journal), running, late = recording(), router_of(), router_of()
    for name in NAMES:
        router.choose(prompt_of(b"abc"), [name], 0.0).close(Outcome(True), 1.0)
    router.restarted("r1")
    router.remove("r2")
    router.restarted("r1")  # holds nothing: no news
    assert journal.events[-2:] == [CacheLost("r1"), CacheLost("r2")]
    router.choose(prompt_of(b"ab"), ["r1"], 2.0).close(Outcome(True), 3.0)
    events = sent(journal)
    Follower(running).apply(1, events)
    Follower(late).apply(1, events, past=True)
    assert running.trie.held() == {"r1": 3, "r2": 3, "r3": 3}
    assert late.trie.held() == {"r1": 2, "r2": 0, "r3": 3}


def test_a_restart_that_counts_show_is_no_event_for_others_see_the_same_counts() -> None:
    (router, journal), other = recording(), router_of()
    follower = Follower(other)
    for each in (router, other):
        each.add(Replica("r1", 1000))  # no full cache explains a miss
    texts = [bytes([first]) * 8 for first in b"abcd"]
    for text in (texts[0], *texts):
        for _ in range(2):  # the second one hits: the replica does report
            booking = router.choose(prompt_of(text), ["r1"], 1.0)
            booking.close(Outcome(True, 8, booking.chosen.matched_tokens), 1.5)
    lost = [router.choose(prompt_of(text), ["r1"], 2.0).close(Outcome(True, 8, 0), 2.5) for text in texts[:3]]
    assert lost == [False, False, True]
    assert not [event for event in journal.events if isinstance(event, CacheLost)]
    assert follower.apply(1, sent(journal)) == ["r1"]
    assert other.trie.held() == router.trie.held()


def test_rents_are_paid_and_copies_bought_together() -> None:
    (router, journal), other = recording(), router_of()
    follower, prompt, paid = Follower(other), prompt_of(b"a" * 5000), 0
    router.choose(prompt, ["r1"], 0.0).close(Outcome(True), 0.0)
    while True:  # each waits behind others while r2 idles, until that has cost as much as a copy
        router.choose(prompt_of(b"b" * 500), ["r1"], 1.0)
        booking = router.choose(prompt, ["r1", "r2"], 1.0)
        follower.apply(1, journal.take())
        assert repr(other.rents) == repr(router.rents)
        if booking.chosen.replica == "r2":
            break
        paid += 1
    assert paid > 1
    assert len(other.rents) == 0


def test_a_request_that_its_router_held_back_for_a_slot_shows_no_speed() -> None:
    (router, journal), other = recording(), router_of()
    for each in (router, other):
        each.add(Replica("r1", None, shares_inflight=False, slots=True))
    follower = Follower(other)
    texts = b"h" * 16 + b"a", b"h" * 16 + b"b" * 8
    lead, late = (router.choose(Prompt(keys_of(text), len(text) * 1000, 1000, ""), ["r1"], 0.0) for text in texts)
    assert late.lead is not None
    lead.first_token(2.125)
    lead.close(Outcome(True, 17_000, 0), 4.0)
    late.release(4.0)
    late.first_token(5.0)
    late.close(Outcome(True, 24_000, 16_000), 6.0)
    follower.apply(1, sent(journal))
    loads = [each.ledger.loads["r1"] for each in (router, other)]
    assert [load.rate.value for load in loads] == [pytest.approx(8000.0)] * 2
    assert repr(loads[1].serial) == repr(loads[0].serial)


def test_of_a_very_long_prompt_others_are_told_the_beginning() -> None:
    """One event has to fit into what carries it."""
    journal = Journal(lambda: None)
    router = router_of(journal=journal, memory_bytes=1 << 26)
    prompt = Prompt(os.urandom((MAX_BLOCKS + 5) * KEY_BYTES), (MAX_BLOCKS + 5) * 10, 10, "")
    first = router.choose(prompt, NAMES[:1], 1.0)
    first.first_token(1.5)
    again = router.choose(prompt, NAMES[:2], 2.0)
    router.move(again, NAMES[1:2], 2.5)
    events = sent(journal)
    other = router_of(memory_bytes=1 << 26)
    follower = Follower(other)
    follower.apply(1, events)
    assert len(encode(events[:1])) < MAX_BLOCKS * KEY_BYTES + 1000
    assert other.rank(prompt, NAMES[:1], 3.0)[0].best.matched_blocks == MAX_BLOCKS
    for booking in (first, again):
        booking.close(Outcome(ok=True), 3.0)
    follower.apply(1, sent(journal))
    follower.check()
    assert other.ledger.open_leases == 0


def opened(number: int, keys: bytes = b"12345678") -> BookingOpened:
    return BookingOpened(number, keys, 20, 10, "", 0, 0, 0, (), NAMES[0], 0, 10, 10, 1.0, False, 0, 0)


@pytest.mark.parametrize(("bounds", "fit"), [({"most_open": 3}, 3), ({"most_bytes": 40}, 5)])
def test_what_others_have_open_is_bounded(bounds: dict[str, int], fit: int) -> None:
    router = router_of()
    follower = Follower(router, **bounds)
    follower.apply(1, [opened(number) for number in range(1, 3)])
    follower.apply(2, [opened(number) for number in range(1, 100)])
    assert router.ledger.open_leases == fit
    follower.check()
    follower.apply(1, [BookingClosed(1, True, None, None, 2.0, True, True)])
    follower.apply(3, [opened(1), opened(2)])
    assert router.ledger.open_leases == fit, "there was room for one more"
    for source in (1, 2, 3):
        follower.leave(source, 3.0)
    follower.check()
    assert router.ledger.open_leases == 0


def test_a_booking_moves_a_bounded_number_of_times() -> None:
    router = router_of()
    follower = Follower(router)
    follower.apply(1, [opened(1), *[BookingMoved(1, NAMES[at % 2], 0, 10, 10, 1.0, 0) for at in range(MAX_MOVES + 2)]])
    assert router.ledger.of(NAMES[(MAX_MOVES - 1) % 2]).inflight == 1
    follower.apply(1, [BookingMoved(1, NAMES[MAX_MOVES % 2], 0, 10, 10, 1.0, 0)])
    assert router.ledger.of(NAMES[(MAX_MOVES - 1) % 2]).inflight == 1
    follower.leave(1, 2.0)
    follower.check()
