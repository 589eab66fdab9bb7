"""Load of others: what engines report beyond our own requests, in the price of their replica."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import Outcome, Prompt, Replica, Router
from router.learning.foreign import BUSY_S, MOST_RUNNING, MOST_TOKENS, STALE_S, TOKENS, WATCH_S, ForeignLoad
from router.pricing.cost import DECODE_TOKENS

RATE = 10_000.0
COLD = Prompt(b"", 1000, 100, "")
NAMES = ["r1", "r2"]


def router_of() -> Router:
    router = Router(policy="cost", ttl_s=3600.0, memory_bytes=1 << 24, chance=random.Random(3))
    for name in NAMES:
        router.add(Replica(name))
        router.ledger.restore(name, (1e6, 1e6 / RATE), 0.0, 0.0)
    router.ledger.rates.refresh()
    return router


def queues(router: Router, now: float) -> list[float]:
    """The queue of each replica in seconds, as priced."""
    ranking = router.rank(COLD, NAMES, now)[1]
    return [next(one.cost.queue_s for one in ranking if one.replica == name) for name in NAMES]


def test_requests_of_others_are_a_queue() -> None:
    router = router_of()
    router.reported("r1", 2, 10, 0, 0.0)
    assert queues(router, 0.0) == [pytest.approx(10 * TOKENS / RATE), 0.0]
    assert router.rank(COLD, ["r1"], 0.0)[0].best.cost.decode_s == pytest.approx(2 * DECODE_TOKENS / RATE)
    assert {router.choose(COLD, NAMES, 0.0).lease.replica for _ in range(10)} == {"r2"}
    router.check()


def test_own_requests_are_not_load_of_others() -> None:
    router = router_of()
    own = len([router.choose(COLD, ["r1"], 0.0) for _ in range(5)])
    before = queues(router, 0.0)
    router.reported("r1", 1, 4, own, 0.0)
    assert queues(router, 0.0) == before
    router.reported("r1", 1, 9, own, 0.0)  # five of ten are ours
    assert queues(router, 0.0)[0] == pytest.approx(before[0] + 4.5 * TOKENS / RATE)


def test_an_engine_is_watched_for_a_while_once_it_has_shown_requests_of_others() -> None:
    router = router_of()
    assert not router.ledger.shared("r1", 0.0)
    router.reported("r1", 2, 10, 12, 0.0)
    assert not router.ledger.shared("r1", 0.0)
    router.reported("r1", 2, 10, 0, 0.0)
    router.reported("r1", 0, 0, 0, 2.0)
    found = [router.ledger.shared(name, now) for name, now in (("r1", 2.0), ("r2", 2.0), ("r1", WATCH_S))]
    assert found == [True, False, False]


def test_a_stale_figure_fades() -> None:
    router = router_of()
    router.reported("r1", 2, 10, 0, 0.0)
    found = [queues(router, seconds)[0] for seconds in (0.0, 2.0, 5.0, STALE_S, 10 * STALE_S)]
    assert found[0] == max(found)
    assert found[3] < found[0] / 2
    assert found[-1] == 0.0


def test_what_waits_is_used_up_by_what_the_engine_computes_beside_our_own_work() -> None:
    router = router_of()
    own = router.choose(COLD, ["r1"], 0.0)
    router.reported("r1", 0, 11, 1, 0.0)
    load = router.ledger.loads["r1"].foreign
    assert load is not None
    before = load.waiting(0.5, RATE)
    own.first_token(0.5)
    assert load.waiting(0.5, RATE) - before == pytest.approx(COLD.units / TOKENS, rel=0.1)
    assert load.waiting(8 * STALE_S, RATE) == 0.0, "less than FEW"
    load.computed(10**6)
    assert load.waiting(0.5, RATE) < 11, "hardly more than were reported"


def test_between_reports_a_load_is_expected_to_be_as_on_average() -> None:
    steady = ForeignLoad()
    for second in range(0, 120, 2):
        steady.report(8, 10 if second % 4 else 0, 0, float(second))
    assert steady.waiting(118.0, RATE) == 10
    assert 1.5 < steady.waiting(124.0, RATE) < 5.0


def test_the_end_of_a_job_is_seen_at_the_next_report() -> None:
    router = router_of()
    router.reported("r1", 2, 10, 0, 0.0)
    router.reported("r1", 0, 0, 0, 2.0)
    assert queues(router, 2.0) == [0.0, 0.0]


def test_the_prefill_of_a_foreign_request_is_learned_from_own_waits() -> None:
    router, now = router_of(), 0.0
    for _ in range(40):
        router.reported("r1", 1, 4, 0, now)
        booking = router.choose(COLD, ["r1"], now)
        booking.first_token(now + 0.1 + 4 * 0.5)  # each foreign request takes half a second
        booking.close(Outcome(True, 1000, 0), now + 3.0)
        now += 4.0
    router.reported("r1", 1, 4, 0, now)
    assert queues(router, now)[0] == pytest.approx(4 * 0.5, rel=0.1)
    assert router.ledger.rates.of("r1").value == pytest.approx(RATE)  # it computes as fast as before


def test_a_wait_behind_an_own_request_shows_no_prefill_of_others() -> None:
    router = router_of()
    router.reported("r1", 1, 4, 0, 0.0)
    for booking, now in [(router.choose(COLD, ["r1"], 0.0), now) for now in (2.1, 2.2)]:
        booking.first_token(now)
    router.reported("r1", 1, 4, 0, 3.0)
    assert queues(router, 3.0)[0] == pytest.approx(4 * 0.5)


def test_what_an_engine_says_changes_its_own_price_only() -> None:
    router = router_of()
    router.reported("r1", 10**6, 10**6, 0, 0.0)
    assert queues(router, 0.0) == [pytest.approx(MOST_TOKENS / RATE), 0.0]
    router.reported("nobody", 5, 5, 0, 0.0)
    assert "nobody" not in router.ledger.loads
    router.check()


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**4), st.floats(0, 1e6)), max_size=20))
def test_any_reports_give_a_bounded_load(reports: list[tuple[int, int, int, float]]) -> None:
    load, now = ForeignLoad(), 0.0
    for running, waiting, own, at in reports:
        now = max(now, at)
        load.report(running, waiting, own, now)
        load.learn(load.waiting(now, RATE), float(at) - 1e3)
        for later in (now, now + 3.0, now + 1e4):
            assert 0 <= load.tokens(later, RATE) <= MOST_TOKENS
            assert 0 <= load.running(later) <= MOST_RUNNING
    assert load.waiting(now + 1e6, RATE) == 0.0


def test_the_time_in_which_prompts_of_others_wait_is_busy_time() -> None:
    load = ForeignLoad()
    load.report(1, 10, 0, 0.0)
    assert load.busy(0.0) == 0.0, "one report shows no time"
    for number in range(1, 1000):
        load.report(1, 10 * (number % 2), 0, float(number))
    assert load.busy(999.0) == pytest.approx(0.5, abs=0.01)
    assert load.busy(999.0 + BUSY_S) == pytest.approx(load.busy(999.0) / math.e)
