from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.learned import Median, Ratio

positive = st.floats(1e-3, 1e6)


def test_a_belief_counts_as_much_as_its_weight() -> None:
    ratio = Ratio(10.0, weight=5.0, half_life=math.inf)
    assert ratio.value == 10.0
    ratio.learn(200.0, 5.0, weight=5.0)
    assert ratio.value == pytest.approx((50.0 + 200.0) / 10.0)
    assert repr(ratio) == "<Ratio 25>"


def test_what_was_seen_is_near_within_a_factor_of_two() -> None:
    ratio = Ratio(10.0, 5.0, half_life=20.0)
    assert [ratio.near(seen) for seen in (0.1, 5.0, 7.0, 13.0, 20.0, 500.0)] == [5.0, 5.0, 7.0, 13.0, 20.0, 20.0]


def test_evidence_halves_with_its_half_life_and_not_with_the_number_of_observations() -> None:
    few, many = Ratio(10.0, 4.0, half_life=100.0), Ratio(10.0, 4.0, half_life=100.0)
    few.learn(1.0, 2.0, weight=100.0)
    assert few.value == pytest.approx((20.0 + 1.0) / (2.0 + 2.0))
    for _ in range(1000):
        many.learn(1e-9, 2e-9, weight=0.1)
    many.learn(1.0, 2.0, weight=0.0)
    assert many.value == pytest.approx(few.value, rel=1e-6)


def test_sums_keep_small_observations_from_drowning_large_ones() -> None:
    ratio = Ratio(1.0, 1e-6, half_life=math.inf)
    ratio.learn(10_000.0, 1.0, 1.0)
    for _ in range(50):
        ratio.learn(1e-3, 1e-3, 1e-3)  # of a quotient of 1, but next to nothing
    assert ratio.value > 9000


@given(positive, positive, st.lists(st.tuples(positive, positive, st.floats(0, 1e3)), max_size=30))
def test_a_ratio_stays_between_all_that_it_has_learned(
    value: float, weight: float, seen: list[tuple[float, float, float]]
) -> None:
    ratio = Ratio(value, weight, half_life=50.0)
    learned = [value]
    for over, under, fades in seen:
        ratio.learn(over, under, fades)
        learned.append(over / under)
        assert min(learned) * (1 - 1e-9) <= ratio.value <= max(learned) * (1 + 1e-9)


@given(positive, st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0, 1)), max_size=50))
def test_a_median_stays_in_its_bounds_and_moves_towards_what_it_sees(start: float, seen: list[tuple[float, float]]) -> None:
    median = Median(start, low=1e-3, high=1e6)
    for value, weight in seen:
        before = median.value
        median.learn(value, weight)
        assert 1e-3 <= median.value <= 1e6
        assert (median.value >= before) if value > before else (median.value <= before)


def test_a_median_is_not_moved_by_how_far_off_the_far_ones_are() -> None:
    chance, median = random.Random(1), Median(1.0, 1e-3, 1e9)
    for _ in range(3000):
        median.learn(1e8 if chance.random() < 0.3 else chance.uniform(9.0, 11.0), 0.2)
    assert 9.0 < median.value < 12.0
    assert repr(median) == f"<Median {median.value:.6g}>"


def test_what_weighs_nothing_moves_nothing_and_half_the_weight_half_as_far() -> None:
    none, half, full = (Median(10.0, 1.0, 100.0) for _ in range(3))
    for median, weight in ((none, 0.0), (half, 0.5), (full, 1.0)):
        median.learn(50.0, weight)
    assert none.value == 10.0
    assert math.log(full.value / 10) == pytest.approx(2 * math.log(half.value / 10)) == pytest.approx(0.1)
