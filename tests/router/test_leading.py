"""Requests with one cold head: who computes it, who waits for whom, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router import MAX_LEAD_S, Booking, Outcome, Prompt, Replica, Router
from router.leading import LEAST_S, LOOK, Lead
from router.load import Lease
from router.types import KEY_BYTES
from tests.support.machines import share_of
from tests.support.strategies import keys_of

RATE = 1000.0  # tokens per second
BLOCK = 100  # tokens
APART, TOGETHER = False, True


def router_of(*names: str, shares: bool | None = APART, slots: bool = False) -> Router:
    router = Router(policy="cost", ttl_s=3600.0, memory_bytes=1 << 24, chance=random.Random(3))
    for name in names:
        router.add(Replica(name, shares_inflight=shares, slots=slots))
        router.ledger.restore(name, (1e6, 1e6 / RATE), 0.0, 0.0)
    router.ledger.rates.refresh()
    return router


def prompt(head: bytes, tail: bytes = b"") -> Prompt:
    """A block for each byte."""
    text = head + tail
    return Prompt(keys_of(text), len(text) * BLOCK, BLOCK, "")


def sibling(number: int, head: int = 40, tail: int = 2) -> Prompt:
    return prompt(b"h" * head, bytes([number]) * tail)


def end(booking: Booking, now: float, cached: int | None = None) -> None:
    booking.first_token(now)
    booking.close(Outcome(True, booking.prompt.units, cached), now)


def waits_for(booking: Booking) -> Lease | None:
    assert (booking.lead is None) == (booking.lease.lead is None)
    return booking.lead.lease if booking.lead else None


def test_the_first_computes_the_head_and_the_others_wait_for_it() -> None:
    router = router_of("r1", "r2", "r3")
    bookings = [router.choose(sibling(number), ["r1", "r2", "r3"], 0.0) for number in range(6)]
    first = bookings[0]
    assert len({booking.lease.replica for booking in bookings}) == 1
    assert [waits_for(booking) for booking in bookings] == [None] + [first.lease] * 5
    assert all(booking.lead and not booking.lead.over for booking in bookings[1:])
    assert first.lease.load.sent_sequences == 1, "more in the engine's reports are of others"
    first.first_token(4.2)
    assert all(booking.lead and booking.lead.over and not booking.lead.lost for booking in bookings[1:])
    router.check()


@pytest.mark.parametrize("shares", [TOGETHER, None])
def test_nobody_waits_where_prefixes_in_flight_are_shared_or_nothing_is_known(shares: bool | None) -> None:
    router = router_of("r1", shares=shares)
    assert {waits_for(router.choose(sibling(number), ["r1"], 0.0)) for number in range(6)} == {None}
    assert router.shares_inflight("r1") is not False


def test_a_lone_request_and_strangers_do_not_wait() -> None:
    router = router_of("r1")
    assert waits_for(router.choose(sibling(1), ["r1"], 0.0)) is None
    assert waits_for(router.choose(prompt(b"other" * 9), ["r1"], 0.0)) is None
    assert waits_for(router.choose(prompt(b""), ["r1"], 0.0)) is None


def test_what_is_computed_is_not_waited_for() -> None:
    router = router_of("r1")
    end(router.choose(sibling(1), ["r1"], 0.0), 5.0)
    running = router.choose(sibling(2), ["r1"], 6.0)
    assert waits_for(router.choose(sibling(3), ["r1"], 6.0)) is None, "the head is warm: the running one computes its own tail"
    running.first_token(6.1)


def test_the_next_one_leads_if_the_first_fails() -> None:
    router = router_of("r1")
    bookings = [router.choose(sibling(number), ["r1"], 0.0) for number in range(4)]
    bookings[0].close(Outcome(ok=False), 1.0)
    assert all(booking.lead and booking.lead.lost for booking in bookings[1:])
    for booking in bookings[1:]:
        booking.release(1.0)
        booking.move(["r1"], 1.0)
    assert [waits_for(booking) for booking in bookings[1:]] == [None, bookings[1].lease, bookings[1].lease]
    router.check()


def test_a_follower_is_not_sent_to_a_replica_that_has_left() -> None:
    router = router_of("r1")
    first, follower = (router.choose(sibling(number), ["r1"], 0.0) for number in range(2))
    router.remove("r1")
    first.first_token(4.2)
    assert follower.release(4.2)


def test_a_lead_that_moves_is_followed_to_its_next_replica() -> None:
    router = router_of("r1", "r2")
    first, second = (router.choose(sibling(number), ["r1"], 0.0) for number in range(2))
    first.move(["r2"], 0.5)
    assert second.lead
    assert second.lead.lost
    second.release(0.5)
    second.move(["r1", "r2"], 0.5)
    assert (second.lease.replica, waits_for(second)) == ("r2", first.lease)


@pytest.mark.parametrize(("tail", "waits"), [(2, True), (38, True), (120, False)])
def test_it_waits_as_long_as_that_is_sooner(tail: int, waits: bool) -> None:
    """Behind a prompt that computes much more than the common head, it is sooner to compute the head beside it."""
    router = router_of("r1")
    long = router.choose(sibling(1, 40, tail), ["r1"], 0.0)
    assert waits_for(router.choose(sibling(2), ["r1"], 0.0)) is (long.lease if waits else None)


def test_a_short_head_is_not_worth_a_wait() -> None:
    router = router_of("r1")
    head = 1 + int(LEAST_S * RATE) // BLOCK
    router.choose(sibling(1, head - 1), ["r1"], 0.0)
    assert waits_for(router.choose(sibling(2, head - 1), ["r1"], 0.0)) is None
    router.choose(sibling(3, head, 3), ["r1"], 0.0)
    assert waits_for(router.choose(sibling(4, head, 3), ["r1"], 0.0)) is not None


def test_the_wait_is_bounded_by_the_work_ahead() -> None:
    router = router_of("r1")
    router.choose(sibling(1), ["r1"], 0.0)
    lead = router.choose(sibling(2), ["r1"], 0.0).lead
    assert lead
    assert 4.2 < lead.most_s < 10.0
    router.choose(prompt(b"g" * 2000), ["r1"], 0.0)
    huge = router.choose(prompt(b"g" * 2000, b"!"), ["r1"], 0.0).lead
    assert huge
    assert huge.most_s == MAX_LEAD_S


def test_a_thousand_with_one_head_wait_for_one() -> None:
    router = router_of("r1")
    first = router.choose(sibling(0), ["r1"], 0.0)
    others = [router.choose(sibling(1 + number % 250), ["r1"], 0.0) for number in range(1000)]
    assert {waits_for(booking) for booking in others} == {first.lease}


def test_only_so_many_leases_are_looked_at() -> None:
    router = router_of("r1")
    router.choose(sibling(0), ["r1"], 0.0)
    for number in range(LOOK):
        router.choose(prompt(b"%d" % number * 20), ["r1"], 0.0)
    assert waits_for(router.choose(sibling(1), ["r1"], 0.0)) is None


def test_a_held_lease_computes_nothing_yet() -> None:
    """Neither its progress nor its rate counts the time of the wait."""
    router = router_of("r1", slots=True)
    first, second = (router.choose(sibling(number), ["r1"], 0.0) for number in range(2))
    first.first_token(4.2)
    load = second.lease.load
    assert load.remaining_tokens(9.0) == second.lease.uncached_tokens
    first.close(Outcome(True, first.prompt.units), 10.0)
    second.release(10.0)
    second.first_token(10.2)
    assert second.lease.prefill_s == pytest.approx(0.2)


def test_silent_leases_that_are_held_are_not_taken_for_computed() -> None:
    router = router_of("r1", slots=True)
    first, second = (router.choose(sibling(number), ["r1"], 0.0, silent=number == 1) for number in range(2))
    first.first_token(4.2)
    second.lease.load.advance(1000.0)
    assert not second.lease.decoding


# -- engines with slots


def test_with_slots_each_waits_for_the_one_before_it() -> None:
    router = router_of("r1", slots=True)
    one, two, three = (router.choose(sibling(number), ["r1"], 0.0) for number in range(3))
    assert [waits_for(each) for each in (one, two, three)] == [None, one.lease, two.lease]
    one.first_token(4.2)
    assert two.lead
    assert two.lead.computed
    assert not two.lead.over, "the slot is taken until its end"
    assert 4.0 < two.lead.after_s < 6.0, "as long as its own prefill would take"
    one.close(Outcome(True, one.prompt.units), 5.0)
    assert two.lead.over
    assert not two.lead.lost


def test_with_slots_a_warm_head_is_not_waited_for() -> None:
    """Other slots may hold it, too: only a head that is being computed is in no other slot."""
    router = router_of("r1", slots=True)
    end(router.choose(sibling(1), ["r1"], 0.0), 5.0)
    running = router.choose(sibling(2), ["r1"], 6.0)
    assert [waits_for(router.choose(sibling(number), ["r1"], 6.0)) for number in (3, 4, 5)] == [None] * 3
    end(running, 7.0)


# -- learning


def together(router: Router, number: int, now: float, cached: int | None) -> None:
    one, two = (router.choose(prompt(b"%d." % number * 20, bytes([tail])), ["r1"], now) for tail in range(2))
    assert waits_for(two) is None
    end(one, now + 4.0, 0)
    end(two, now + 5.0, cached)


def test_an_engine_that_computes_twice_is_found_out() -> None:
    router = router_of("r1", shares=None)
    together(router, 10, 0.0, 0)
    together(router, 11, 10.0, 0)
    together(router, 12, 20.0, 0)
    together(router, 13, 30.0, 0)
    assert router.shares_inflight("r1") is None, "it has never reported a cached token: maybe it caches nothing"
    for now in (40.0, 50.0):
        end(router.choose(prompt(b"warm" * 10), ["r1"], now), now + 1, int(now - 40.0) * 399)
    together(router, 14, 60.0, 0)
    together(router, 15, 70.0, 0)
    together(router, 16, 80.0, 0)
    assert router.shares_inflight("r1") is False
    one, two = (router.choose(sibling(number), ["r1"], 90.0) for number in range(2))
    assert waits_for(two) is one.lease
    assert router.evidence_of("r1") is not None
    assert router.trie.held()["r1"], "it was no restart: nobody said that the cache was lost"
    router.restarted("r1")
    assert router.shares_inflight("r1") is not False


@pytest.mark.parametrize("found", [True, False])
def test_an_engine_that_stores_a_prompt_at_its_end_is_found_out(found: bool) -> None:
    """Those that waited for a first token have computed the head again: from then on they wait for an end."""
    router = router_of("r1")
    for now in (0.0, 10.0):
        end(router.choose(prompt(b"warm" * 10), ["r1"], now), now + 1, 3990 if now else 0)
    for number in range(10, 18):
        now = 20.0 * number
        one, two = (router.choose(prompt(b"%d." % number * 20, bytes([tail])), ["r1"], now) for tail in range(2))
        assert waits_for(two) is one.lease
        one.first_token(now + 4)
        two.release(now + 4)
        one.close(Outcome(True, one.prompt.units, 0), now + 6)
        end(two, now + 9, 6000 if found else 0)

    def waits_for_an_end(now: float, tail: int) -> bool:
        one, two = (router.choose(sibling(tail + number), ["r1"], now) for number in range(2))
        assert two.lead
        waits = two.lead.after_s > 0
        for each in (one, two):
            each.close(Outcome(ok=False), now + 1)
        return waits

    assert router.has_slots("r1") is not found
    assert waits_for_an_end(400.0, 0) is not found
    assert router.trie.held()["r1"], "it was no restart"
    router.restarted("r1")
    assert not router.has_slots("r1")
    assert not waits_for_an_end(500.0, 10)


def test_an_engine_that_shares_is_known_for_it_once_it_has_shown_it() -> None:
    router = router_of("r1", shares=None)
    for now in (0.0, 10.0):
        end(router.choose(prompt(b"warm" * 10), ["r1"], now), now + 1, 3990 if now else 0)
    assert router.shares_inflight("r1") is None
    for number in range(10, 14):
        together(router, number, 10.0 * number, 6000)
    assert router.shares_inflight("r1") is True


@pytest.mark.parametrize("cached", [None, 5000])
def test_an_engine_that_shares_or_reports_nothing_is_left_alone(cached: int | None) -> None:
    router = router_of("r1", shares=None)
    for number in range(10, 40):
        together(router, number, 10.0 * number, cached)
    assert router.shares_inflight("r1") is not False


def test_a_lead_that_failed_is_no_evidence() -> None:
    router = router_of("r1", shares=None)
    for number in range(10, 30):
        one, two = (router.choose(prompt(b"%d." % number * 20, bytes([tail])), ["r1"], 10.0 * number) for tail in range(2))
        one.close(Outcome(ok=False), 10.0 * number + 1)
        end(two, 10.0 * number + 5, 0)
    assert router.shares_inflight("r1") is not False


def test_another_engine_under_the_same_name_begins_anew() -> None:
    router = router_of("r1")
    assert router.shares_inflight("r1") is False
    router.add(Replica("r1", shares_inflight=None))
    assert router.shares_inflight("r1") is not False
    router.add(Replica("r1"))
    router.remove("r1")
    assert router.shares_inflight("r1") is not False


# -- any order of events, against an oracle


class Fleet:
    """Requests that behave as the gateway's: held ones are released, or chosen again, when their lead is over."""

    def __init__(self, *, slots: bool) -> None:
        self.names = ["r1", "r2"]
        self.slots = slots
        self.router = router_of(*self.names, slots=slots)
        self.now = 0.0
        self.open = list[Booking]()

    def choose(self, asked: Prompt) -> None:
        self.now += 0.01
        booking = self.router.choose(asked, self.names, self.now)
        assert waits_for(booking) is self._oracle(booking)
        self.open.append(booking)

    def first_token(self, number: int) -> None:
        sent = [booking for booking in self.open if booking.lead is None]
        if sent:
            self.now += 0.5
            sent[number % len(sent)].first_token(self.now)
            self._wake()

    def close(self, number: int, ok: bool) -> None:
        """Of any request: the clients of held ones may leave, too."""
        if self.open:
            self.now += 0.1
            booking = self.open.pop(number % len(self.open))
            booking.close(Outcome(ok and booking.lead is None, booking.prompt.units), self.now)
            self._wake()

    def move(self, number: int) -> None:
        sent = [booking for booking in self.open if booking.lead is None]
        if sent:
            booking = sent[number % len(sent)]
            booking.move([name for name in self.names if name != booking.lease.replica], self.now)
            self._wake()

    def _wake(self) -> None:
        for _ in range(100):  # one that moves is lost as the lead of others
            woken = [booking for booking in self.open if booking.lead is not None and booking.lead.over]
            for booking in woken:
                lost = booking.lead is not None and booking.lead.lost
                booking.release(self.now)
                if lost:
                    booking.move(self.names, self.now)
                    assert waits_for(booking) is self._oracle(booking)
            if not woken:
                break
        self.check()

    def _oracle(self, booking: Booking) -> Lease | None:
        """By the definition, over the whole queue."""
        lease, end = booking.lease, booking.chosen.matched_blocks * KEY_BYTES
        tokens, queue = booking.chosen.matched_tokens, lease.load.waiting
        ahead = queue[: queue.index(lease)]
        for other in reversed(ahead):
            same = end and other.keys[end - KEY_BYTES : end] == booking.prompt.keys[end - KEY_BYTES : end]
            if lease.moves and other.follows:
                continue
            chain = self.slots and other.lead is not None and not lease.moves
            missing = tokens - (other.prompt_tokens - other.uncached_tokens)
            if same and (chain or missing >= LEAST_S * RATE):
                pays = self.slots or other.uncached_tokens < 2 * missing + lease.uncached_tokens
                return other if pays else None
        return None

    def check(self) -> None:
        self.router.check()
        for booking in self.open:
            if (lead := booking.lead) is not None:
                assert isinstance(lead, Lead)
                assert lead.lease.load is booking.lease.load
                assert not lead.lease.closed
                if not lead.lease.decoding:
                    queue = booking.lease.load.waiting
                    assert queue.index(lead.lease) < queue.index(booking.lease), "no cycles"
        for load in self.router.ledger.loads.values():
            assert load.first is None or load.first.lead is None or load.first.lead.decoding, "the first one waits for nobody"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("choose"), st.sampled_from([b"", b"a", b"b"]), st.integers(0, 30), st.integers(0, 3)),
        st.tuples(st.just("first"), st.just(b""), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("close"), st.just(b""), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("move"), st.just(b""), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


CHOOSE, FIRST, CLOSE, MOVE = ((kind, b"", 0, 0) for kind in ("choose", "first", "close", "move"))


@settings(max_examples=share_of(300))
@example([CHOOSE, CHOOSE, CHOOSE, FIRST, CHOOSE, CLOSE, MOVE], True)  # two would follow each other
@given(steps, st.booleans())
def test_in_any_order_the_right_one_leads_and_all_are_served(taken: list[tuple[str, bytes, int, int]], slots: bool) -> None:
    fleet = Fleet(slots=slots)
    for kind, head, number, tail in taken:
        if kind == "choose":
            fleet.choose(prompt(b"x" * 8 + head * number, bytes([100 + tail]) * tail))
        elif kind == "first":
            fleet.first_token(number)
        elif kind == "close":
            fleet.close(number, ok=tail == 1)
        else:
            fleet.move(number)
    for _ in range(2 * len(fleet.open)):
        fleet.first_token(0)
        sent = [at for at, booking in enumerate(fleet.open) if booking.lead is None]
        if not fleet.open:
            break
        assert sent, "somebody is always at work"
        fleet.close(sent[0], ok=True)
    assert not fleet.open
    fleet.check()
