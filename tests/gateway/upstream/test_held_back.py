"""For how long an answer was held back of late: against the definition, in steps of a 128th of a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.held_back import HELD_S, MOST_S, Held

STEP_S = 1 / 128  # sums of it are exact


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=30))
def test_it_is_the_time_held_back_less_the_time_not(turns: list[tuple[bool, int]]) -> None:
    held, now, seconds = Held(), 100.0, 0.0
    for on, steps in turns:
        held.turn(now, on=on)
        for _ in range(steps):
            now += STEP_S
            seconds = min(MOST_S, seconds + STEP_S) if on else max(0.0, seconds - STEP_S)
        assert held.lately(now) is (seconds >= HELD_S)
    held.clear()
    assert not held.lately(now)


@pytest.mark.parametrize(("held_s", "free_s", "lately"), [(0.9, 0.1, True), (0.05, 0.95, False)])
def test_many_small_steps_are_one_hold_and_moments_are_none(held_s: float, free_s: float, lately: bool) -> None:
    held, now = Held(), 0.0
    for _ in range(1000):
        held.turn(now, on=True)
        held.turn(now + held_s, on=False)
        now += held_s + free_s
    assert held.lately(now) is lately
    assert not held.lately(now + MOST_S)
    assert repr(held).startswith("<Held off since 99")
