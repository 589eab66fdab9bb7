from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import Cost
from router.index.holds import reuse_chance
from router.pricing.cost import DECODE_TOKENS, DUPLICATE_WEIGHT, FIRST_SHARE, START_S, cost, delay, discounted, starting

seconds = st.floats(0, 1e6)


def test_the_cost_is_in_seconds_and_adds_up() -> None:
    parts = cost(
        booked=3000,
        uncached=1000,
        duplicate=500,
        evicted=400.0,
        decoding=4,
        prefill_rate=2000.0,
        others_s=3.0,
    )
    assert parts == Cost(
        queue_s=1.5,
        prefill_s=0.5,
        others_s=3.0,
        duplicate_s=DUPLICATE_WEIGHT * 0.25,
        evicted_s=0.2,
        decode_s=4 * DECODE_TOKENS / 2000,
    )
    assert parts.total_s == pytest.approx(1.5 + 0.5 + 3.0 + 0.25 * DUPLICATE_WEIGHT + 0.2 + 4 * DECODE_TOKENS / 2000)


def test_who_comes_back_waits_behind_a_queue_for_all_of_a_prefill_and_later_for_half_of_it() -> None:
    assert delay(queue_s=1.5, work_s=0.5, return_rate=2.0, mean_s=math.inf) == 2.0 * (1.5 * 0.5 + 0.5 * 0.25)
    shortest_first = delay(queue_s=1.5, work_s=0.5, return_rate=2.0, mean_s=0.25)
    assert shortest_first == pytest.approx(2.0 * (math.exp(-2.0) * 1.5 * 0.5 + 0.5 * 0.25)), "only longer ones wait for it"
    assert delay(queue_s=1.5, work_s=0.5, return_rate=2.0, mean_s=0.0) == 1.75, "of nothing known yet"


def test_a_block_is_worth_less_the_longer_nobody_used_it() -> None:
    assert reuse_chance(0.0, 60.0) == 1.0
    assert reuse_chance(60.0, 60.0) == pytest.approx(1 / math.e)
    assert reuse_chance(60.0, 120.0) > reuse_chance(60.0, 60.0), "where blocks live longer, the same pause is weaker evidence"
    assert reuse_chance(-5.0, 60.0) == 1.0, "a clock that jumped back"


def test_rent_is_taken_off_the_price_of_the_copy_alone() -> None:
    full = Cost(queue_s=9.0, prefill_s=1.0, others_s=2.0, duplicate_s=3.0, evicted_s=4.0, decode_s=8.0)
    assert discounted(full, 6.0) == full._replace(rent_s=-6.0)
    assert discounted(full, 60.0).total_s == 9.0 + 8.0, "the queue and the sequences that run are no part of it"


@given(st.tuples(*[seconds] * 6), seconds)
def test_no_rent_makes_a_replica_cheaper_than_its_queue(parts: tuple[float, ...], rent: float) -> None:
    full = Cost(*parts)
    after = discounted(full, rent)
    assert after._replace(rent_s=0.0) == full
    assert full.total_s >= after.total_s >= full.queue_s + full.decode_s - 1e-9 * full.total_s


@pytest.mark.parametrize(("age_s", "share"), [(-5.0, 0.1), (0.0, 0.1), (5.0, 0.55), (10.0, 1.0), (1e9, 1.0)])
def test_new_work_is_dear_on_a_replica_that_has_just_come_up(age_s: float, share: float) -> None:
    assert 2.0 + starting(2.0, age_s) == pytest.approx(2.0 / share)


@given(seconds, st.floats(-5, 15), st.floats(0, 5))
def test_the_price_of_a_start_only_falls(work_s: float, age_s: float, later_s: float) -> None:
    assert work_s * (1 / FIRST_SHARE - 1) >= starting(work_s, age_s) >= starting(work_s, age_s + later_s) >= 0.0
    assert starting(work_s, START_S) == 0.0
