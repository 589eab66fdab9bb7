"""Times of other machines, by way of the store's clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.sharing.clock import KEEP_S, MAX_PAST_S, StoreClock, plausible

STORE = 1_700_000_000.0


def test_without_a_measurement_everything_is_now() -> None:
    clock = StoreClock()
    assert clock.local(STORE, 50.0) == 50.0
    assert clock.store(50.0) is None


def test_the_quickest_measurement_counts_until_it_is_old() -> None:
    clock = StoreClock()
    clock.measure(10.0, 10.2, STORE)
    assert clock.local(STORE, 50.0) == pytest.approx(10.1)
    clock.measure(20.0, 20.002, STORE + 9.93)
    assert clock.local(STORE + 9.93, 50.0) == pytest.approx(20.001)
    clock.measure(30.0, 30.1, STORE + 19.94)
    assert clock.local(STORE + 9.93, 50.0) == pytest.approx(20.001), "the slower one is less exact"
    late = 20.0 + KEEP_S + 1
    clock.measure(late, late + 0.1, STORE + late - 10.0)
    assert clock.local(STORE + late - 10.0, late + 1) == pytest.approx(late + 0.05)


def test_a_clock_that_is_set_is_believed_at_once() -> None:
    clock = StoreClock()
    clock.measure(10.0, 10.001, STORE)
    clock.measure(11.0, 11.010, STORE + 301.0)
    assert clock.local(STORE + 301.0, 50.0) == pytest.approx(11.005)


@given(st.floats(-600, 600), st.floats(0, 0.05), st.floats(0, 0.05), st.floats(0, 1000))
def test_the_wall_clocks_of_gateways_play_no_part(wall: float, there: float, back: float, booted: float) -> None:
    """An event of a machine whose clocks differ by anything arrives with the error of the measurement at most."""
    reader = StoreClock()
    begin = 100.0
    reader.measure(begin, begin + there + back, STORE + wall + begin + there)
    happened, sent = 200.0, 200.02  # by the reader's clock
    writer_sent = sent + booted
    written_at = STORE + wall + sent + 0.001  # the store's date of the entry
    shift = reader.local(written_at, 300.0) - writer_sent
    assert abs((happened + booted) + shift - happened) <= (there + back) / 2 + 0.0011


def test_what_cannot_be_is_bounded() -> None:
    assert plausible(200.0, 100.0) == 100.0
    assert plausible(-1e9, 100.0) == 100.0 - MAX_PAST_S
    assert plausible(math.nan, 100.0) == 100.0
    assert plausible(math.inf, 100.0) == 100.0
