"""A clock that has jumped, in whichever direction, is not to be trusted for an hour."""

from __future__ import annotations

import pytest

from gateway.database.steadiness import JUMP_S, STEADY_S, Steadiness


@pytest.mark.parametrize("jump", [2 * JUMP_S, -2 * JUMP_S, 1e9, -1e9, float("inf"), float("nan")])
def test_a_jump_begins_the_hour_anew(jump: float) -> None:
    steadiness, wall = Steadiness(), 1.8e9
    assert not steadiness.steady(wall, 0.0)
    assert steadiness.steady(wall + STEADY_S, STEADY_S)
    assert not steadiness.steady(wall + STEADY_S + jump, STEADY_S)
    assert not steadiness.steady(wall + 2 * STEADY_S + jump - 1, 2 * STEADY_S - 1)


def test_corrections_are_no_jumps() -> None:
    steadiness, wall = Steadiness(), 1.8e9
    steadiness.steady(wall, 0.0)
    for step in range(1, 121):
        wall += JUMP_S / 2 * (-1) ** step
        steady = steadiness.steady(wall + 30.0 * step, 30.0 * step)
    assert steady
