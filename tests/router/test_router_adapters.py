"""Requests that name an adapter go where it is loaded, unless that replica is busier by more than a load."""

from __future__ import annotations

import random

import pytest

from router import Booking, Outcome, Prompt, Replica, Router
from router.follower import Follower
from router.replication_log import Journal
from tests.support.strategies import keys_of

FLEET = ["r1", "r2", "r3", "r4"]
TOKENS = 1000


def router_of(journal: Journal | None = None) -> Router:
    router = Router(policy="cost", ttl_s=300.0, memory_bytes=1 << 24, chance=random.Random(3), journal=journal)
    for name in FLEET:
        router.add(Replica(name, adapters=2))
    return router


def prompt(number: int, adapter: str, units: int = TOKENS) -> Prompt:
    """Shares no block with those of other numbers."""
    made = Prompt(keys_of(bytes([number])), units, 1, "", client=number % 5)
    made.adapter = adapter
    return made


def answer(booking: Booking, now: float) -> str:
    booking.first_token(now)
    booking.close(Outcome(True, booking.prompt.units, 0), now)
    return booking.chosen.replica


def test_an_adapter_stays_where_it_is_loaded() -> None:
    router = router_of()
    homes = {name: answer(router.choose(prompt(number, name), FLEET, 0.0), 1.0) for number, name in enumerate("abcd")}
    for turn in range(40):
        name = "abcd"[turn % 4]
        booking = router.choose(prompt(10 + turn, name), FLEET, 300.0 * (turn + 1))
        assert booking.chosen.cost.adapter_s == 0.0
        assert booking.chosen.cost.total_s == pytest.approx(sum(booking.chosen.cost))
        assert answer(booking, 300.0 * (turn + 1) + 1) == homes[name]
    router.check()


def test_requests_without_adapter_go_anywhere_and_pay_nothing() -> None:
    router = router_of()
    answer(router.choose(prompt(0, "a"), FLEET, 0.0), 1.0)
    ranking = [router.choose(prompt(1 + turn, ""), FLEET, 300.0 * (turn + 1)) for turn in range(20)]
    assert all(booking.chosen.cost.adapter_s == 0.0 for booking in ranking)
    assert len({answer(booking, 1e5) for booking in ranking}) > 1


def test_a_busy_replica_is_left_for_the_price_of_a_load() -> None:
    router = router_of()
    home = answer(router.choose(prompt(0, "a"), FLEET, 0.0), 1.0)
    few = router.choose(prompt(1, "", 400), [home], 500.0)
    assert router.choose(prompt(2, "a"), FLEET, 500.0).chosen.replica == home, "50 ms of waiting, a load is 100 ms"
    few.close(Outcome(False), 500.0)
    router.choose(prompt(3, "", 4000), [home], 500.0)
    elsewhere = router.choose(prompt(4, "a"), FLEET, 500.0)
    assert elsewhere.chosen.replica != home
    assert elsewhere.chosen.cost.adapter_s == router.adapters.load.value > 0


def test_the_load_is_learned_from_first_tokens_and_teaches_no_rate() -> None:
    router, rate, now = router_of(), 5000.0, 0.0
    for number in range(200):
        booking = router.choose(prompt(number, f"{number % 40}"), FLEET, now)
        answer(booking, now + TOKENS / rate + (0.5 if booking.loads else 0.0))
        if number in range(20, 40):  # before these, no request shows the rate alone
            answer(router.choose(prompt(200 + number % 4, ""), [FLEET[number % 4]], now + 100), now + 100 + TOKENS / rate)
        now += 1000.0
    assert router.adapters.load.value == pytest.approx(0.5, rel=0.25)
    assert all(router.ledger.of(name).rate.value == pytest.approx(rate, rel=0.25) for name in FLEET)


def test_a_refused_request_moves_no_belief() -> None:
    router = router_of()
    homes = {name: answer(router.choose(prompt(number, name), ["r1"], 0.0), 1.0) for number, name in enumerate("ab")}
    for number in range(20):
        router.choose(prompt(10 + number, f"other {number}"), ["r1"], 2.0).close(Outcome(False), 2.0)
    for number, name in enumerate("ab"):
        booking = router.choose(prompt(50 + number, name), FLEET, 500.0 * (number + 1))
        assert (booking.loads, answer(booking, 500.0 * (number + 1) + 1)) == (False, homes[name])


def test_a_request_that_moves_takes_its_adapter_with_it() -> None:
    router = router_of()
    booking = router.choose(prompt(0, "a"), FLEET, 0.0)
    left = booking.chosen.replica
    booking.move([name for name in FLEET if name != left], 0.5)
    assert booking.loads
    home = answer(booking, 1.0)
    assert router.adapters.load_s(left, "a") > router.adapters.load_s(home, "a") == 0.0
    router.restarted(home)
    assert router.adapters.load_s(home, "a") > 0
    router.check()


def test_a_follower_knows_the_adapters_of_the_others() -> None:
    journal = Journal(lambda: None)
    router, other = router_of(journal), router_of()
    home = answer(router.choose(prompt(0, "a"), FLEET, 0.0), 1.0)
    Follower(other).apply(1, journal.take())
    assert other.choose(prompt(1, "a"), FLEET, 500.0).chosen.replica == home
    other.check()
