"""How many bytes a token has, learned from what engines count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.scales import DEFAULT_UNITS_PER_TOKEN, MAX_CLIENTS, MAX_REPLICAS, MAX_UNITS, MIN_UNITS, Scales


def learned(*prompts: tuple[int, int]) -> float:
    scales = Scales()
    for units, tokens in prompts:
        scales.learn("m", units, tokens)
    return scales.units_per_token("m")


def test_nothing_is_known_at_first() -> None:
    assert (Scales().units_per_token("m"), Scales().units_per_token("")) == (DEFAULT_UNITS_PER_TOKEN, 1.0)


def test_it_becomes_what_engines_count() -> None:
    assert learned(*[(6000, 2000)] * 10) == pytest.approx(3.0, rel=0.01)
    assert learned(*[(3300, 1100)] * 3) == pytest.approx(3.0, rel=0.05)


def test_short_prompts_do_not_decide_about_long_ones() -> None:
    """A template of 30 tokens around "hi"."""
    short = [(33, 37)] * 300
    assert learned(*short, (6800, 1700)) == pytest.approx(4.0, rel=0.2)
    assert learned(*short, (6800, 1700), *short) == pytest.approx(4.0, rel=0.3)


@pytest.mark.parametrize(("units", "tokens"), [(100, 0), (100, None), (10, 1000), (100_000, 10)])
def test_what_is_not_about_text_is_ignored(units: int, tokens: int | None) -> None:
    scales = Scales()
    scales.learn("m", units, tokens)
    assert len(scales) == 0


@given(st.lists(st.tuples(st.integers(1, 10**7), st.integers(0, 10**9)), max_size=50))
def test_it_stays_within_its_bounds(prompts: list[tuple[int, int]]) -> None:
    assert MIN_UNITS <= learned(*prompts) <= MAX_UNITS


def test_one_client_does_not_move_the_scale_of_others() -> None:
    """40 requests of 2,000 printed tokens, with 40 kB of fields that no template prints."""
    for others in (1, 2, 5):
        scales = Scales()
        for number in range(30):
            scales.learn("m", 8000, 2000, 1 + number % others)
        for _ in range(40):
            scales.learn("m", 48_000, 2000, 99)
            scales.learn("m", 2000, 2000, 98 if others > 2 else 99)
        assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("clients", [1, 3, 40])
@pytest.mark.parametrize("replicas", [3, 8, 20])
def test_one_replica_does_not_move_the_scale_of_others(replicas: int, clients: int) -> None:
    """It counts just under two tokens a byte, or one for fifteen: each is possible for some text."""
    for lie in (5700, 200):
        scales = Scales()
        for number in range(40 * replicas):
            replica = number % replicas
            tokens = lie if replica == 1 else 750
            scales.learn("m", 3000, tokens, number // 3 % clients, f"r{replica}")
        assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.05)


def test_one_replica_of_two_does_not_move_what_the_first_one_showed() -> None:
    scales = Scales()
    for number in range(80):
        scales.learn("m", 3000, 5700 if number % 2 else 750, replica=f"r{number % 2}")
    assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.01)


def test_a_replaced_replica_is_out_voted_by_its_successors() -> None:
    """The first one was wrong, and is gone."""
    scales = Scales()
    for replica in ["wrong", *(f"r{number}" for number in range(3 * MAX_REPLICAS))]:
        for _ in range(10):
            scales.learn("m", 3000, 1500 if replica == "wrong" else 750, replica=replica)
    assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.05)


def test_a_restored_scale_gives_way_to_a_client_that_shows_another_one() -> None:
    """Another model has the name since."""
    scales = Scales()
    scales.restore("m", (8.0 * 20_000, 20_000.0))
    scales.learn("m", 4000, 1000, 77)
    assert scales.units_per_token("m") == 8.0, "one answer is no evidence"
    for _ in range(30):
        scales.learn("m", 4000, 1000, 77)
    assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.01)


def test_a_restored_scale_decides_between_two_clients() -> None:
    scales = Scales()
    scales.restore("m", (4.0 * 20_000, 20_000.0))
    for number in range(60):
        scales.learn("m", 4000 if number % 2 else 15_000, 1000, 77 + number % 2)
    assert scales.units_per_token("m") == pytest.approx(4.0, rel=0.01)


def test_the_successor_of_the_only_replica_shows_its_own_scale() -> None:
    scales = Scales()
    for replica, tokens in (("old", 500), ("new", 1000)):
        for _ in range(30):
            scales.learn("m", 4000, tokens, replica=replica)
        scales.forget("old")
        assert scales.units_per_token("m") == pytest.approx(4000 / tokens, rel=0.05)


def test_a_flood_of_clients_keeps_the_first_and_the_last() -> None:
    scales = Scales()
    scales.learn("m", 8000, 2000, 1)
    for number in range(2, 3 * MAX_CLIENTS):
        scales.learn("m", 12_000, 2000, number)
    assert scales.units_per_token("m") > 5
    (name, sums), *_ = scales.entries()
    other = Scales()
    other.restore(name, sums)
    assert other.units_per_token("m") == pytest.approx(scales.units_per_token("m"))
