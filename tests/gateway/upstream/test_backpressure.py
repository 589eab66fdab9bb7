"""For how long an answer was held back of late: against the definition, in steps of a 128th of a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.backpressure import MAX_S, RECENT_S, Backpressure

STEP_S = 1 / 128  # sums of it are exact


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=30))
def test_it_is_the_time_held_back_less_the_time_not(turns: list[tuple[bool, int]]) -> None:
    held, now, seconds = Backpressure(), 100.0, 0.0
    for on, steps in turns:
        held.set(now, on=on)
        for _ in range(steps):
            now += STEP_S
            seconds = min(MAX_S, seconds + STEP_S) if on else max(0.0, seconds - STEP_S)
        assert held.recent(now) is (seconds >= RECENT_S)
    held.clear()
    assert not held.recent(now)


@pytest.mark.parametrize(("held_s", "free_s", "recent"), [(0.9, 0.1, True), (0.05, 0.95, False)])
def test_many_small_steps_are_one_hold_and_moments_are_none(held_s: float, free_s: float, recent: bool) -> None:
    held, now = Backpressure(), 0.0
    for _ in range(1000):
        held.set(now, on=True)
        held.set(now + held_s, on=False)
        now += held_s + free_s
    assert held.recent(now) is recent
    assert not held.recent(now + MAX_S)
    assert repr(held).startswith("<Backpressure off since 99")
