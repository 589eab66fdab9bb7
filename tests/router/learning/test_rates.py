from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.rates import DEFAULT_RATE, PrefillRates


def rates_of(*names: str) -> PrefillRates:
    rates = PrefillRates()
    for name in names:
        rates.add(name, "pool")
    return rates


def work(rates: PrefillRates, name: str, speed: float, tokens: int = 4000, times: int = 1) -> None:
    for _ in range(times):
        rates.of(name).learn(tokens, tokens / speed)


def test_the_first_prefills_replace_the_default_and_a_slower_replica_is_followed() -> None:
    rates = rates_of("r")
    assert rates.of("r").value == DEFAULT_RATE
    work(rates, "r", 200_000.0, times=3)
    assert rates.of("r").value == pytest.approx(200_000, rel=0.01)
    work(rates, "r", 500.0, tokens=1000, times=150)
    assert rates.of("r").value == pytest.approx(500, rel=0.1)


def test_a_replica_without_evidence_is_as_fast_as_the_pool_is_now() -> None:
    rates = rates_of("a", "b", "c", "new")
    for name in "abc":
        work(rates, name, 2000.0, times=10)
    assert rates.of("new").value == pytest.approx(2000, rel=0.05)
    for name in "abc":
        work(rates, name, 8000.0, times=100)
    assert rates.of("new").value == pytest.approx(8000, rel=0.05)
    rates.add("later", "pool")
    assert rates.of("later").value == pytest.approx(8000, rel=0.05)


def test_evidence_of_a_replica_wins_over_the_pool() -> None:
    rates = rates_of("a", "b", "c", "slow")
    for name in "abc":
        work(rates, name, 8000.0, times=10)
    work(rates, "slow", 1000.0, times=10)
    assert rates.of("slow").value == pytest.approx(1000, rel=0.25)
    assert rates.of("a").value == pytest.approx(8000, rel=0.05)


def test_a_replica_that_seems_slow_and_gets_no_requests_returns_to_the_rate_of_its_pool() -> None:
    rates = rates_of("a", "b", "c", "starved")
    for name in "abc":
        work(rates, name, 8000.0, times=10)
    work(rates, "starved", 1000.0, times=10)
    for name in "abc":
        work(rates, name, 8000.0, times=200)
    assert rates.of("starved").value == pytest.approx(8000, rel=0.05)


def test_replicas_that_differ_by_no_more_than_noise_are_equal() -> None:
    rates = rates_of("a", "b", "c", "d")
    for name, speed in zip("abcd", (7000.0, 8000.0, 8000.0, 9000.0), strict=True):
        work(rates, name, speed, times=30)
    assert len({rates.of(name).value for name in "abcd"}) == 1


def test_pools_do_not_know_of_each_other() -> None:
    rates = rates_of("a", "b")
    rates.add("small", "other")
    work(rates, "a", 1000.0, times=20)
    assert rates.of("small").value == DEFAULT_RATE
    assert rates.of("b").value == pytest.approx(1000, rel=0.05)
    moved = rates.of("b")
    rates.add("b", "other")
    assert rates.of("b") is moved
    assert moved.value == DEFAULT_RATE


@pytest.mark.parametrize("speed", [1.9e9, 1e-3])
def test_one_replica_with_absurd_times_moves_no_other_one_and_stays_near_its_pool(speed: float) -> None:
    rates = rates_of("a", "b", "c", "liar")
    for _ in range(50):
        for name in "abc":
            work(rates, name, 8000.0)
        work(rates, "liar", speed, times=20)
    assert all(rates.of(name).value == pytest.approx(8000, rel=0.05) for name in "abc")
    assert 8000 / 16 * 0.9 <= rates.of("liar").value <= 8000 * 16 * 1.1


@pytest.mark.parametrize("seconds", [1e-6, 1e6])
def test_one_absurd_prefill_is_soon_made_good(seconds: float) -> None:
    rates = rates_of("r")
    work(rates, "r", 2000.0, times=30)
    rates.of("r").learn(1_000_000, seconds)
    assert 2000 / 5 <= rates.of("r").value <= 2000 * 5
    work(rates, "r", 2000.0, times=30)
    assert rates.of("r").value == pytest.approx(2000, rel=0.1)


def test_the_overhead_of_short_prompts_teaches_little() -> None:
    """A prefill takes 20 ms beside its tokens; most prompts are short ones."""
    rates, chance = rates_of("r"), random.Random(1)
    for _ in range(500):
        tokens = chance.choice([50, 100, 200, 400, 8000])
        rates.of("r").learn(tokens, 0.02 + tokens / 100_000)
    assert rates.of("r").value > 65_000, "the mean over tokens is 50,000"


@pytest.mark.parametrize(("tokens", "seconds"), [(1000, 0.0), (1000, -3.0), (0, 1.0), (-5, 1.0)])
def test_nonsense_teaches_nothing(tokens: int, seconds: float) -> None:
    rates = rates_of("r")
    rates.of("r").learn(tokens, seconds)
    assert rates.of("r").value == DEFAULT_RATE


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 10**6), st.floats(1e-9, 1e9)), max_size=60))
def test_any_observations_leave_all_rates_within_the_spread_of_their_pool(observations: list[tuple[str, int, float]]) -> None:
    rates = rates_of(*"abcd")
    for name, tokens, seconds in observations:
        rates.of(name).learn(tokens, seconds)
    values = [rates.of(name).value for name in "abcd"]
    assert all(0 < value < float("inf") for value in values)
    assert max(values) <= min(values) * 16 * 16 * 1.001
    assert min(values) <= median(values) <= max(values)


def test_a_replica_that_left_leaves_nothing_behind() -> None:
    rates = rates_of("a", "b")
    work(rates, "a", 100.0, times=20)
    rates.remove("a")
    rates.remove("b")
    assert rates.of("a").value == DEFAULT_RATE
    rates.add("a", "pool")
    assert rates.of("a").value == DEFAULT_RATE
