"""Charts of whatever a gateway sends."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.commands.top.screens.money import SERIES, drawn, lines
from gateway.commands.top.state import Live
from tests.gateway.commands.top.strategies import FRAMES

HUGE = 1.7e308
NUMBERS = st.one_of(st.floats(), st.just(HUGE), st.integers(), st.none(), st.text(max_size=2))
POINT = st.fixed_dictionaries(
    {"time": NUMBERS, "requests": NUMBERS, "prompt_tokens": NUMBERS, "cached_tokens": NUMBERS, "cost_usd": NUMBERS},
    optional={"ttft_p90_s": NUMBERS, "running": NUMBERS, "waiting": NUMBERS, "saved_usd": NUMBERS},
)


@example([{"time": HUGE, "requests": HUGE}] * 2, 0.1, {}, 80)
@given(st.lists(POINT, max_size=8), NUMBERS, FRAMES, st.integers(1, 120))
def test_any_points_are_drawn(points: list[dict[str, Any]], step_s: Any, frame: dict[str, Any], width: int) -> None:
    live = Live()
    live.take("hello", {**frame, "points": points, "step_s": step_s})
    for series in SERIES:
        made = drawn(live, series, width).plain.split("\n")
        assert len(made) == (3 if points else 1)
        assert all(len(line) == width for line in made[1:])
    assert len(lines(live.models)) == len(live.models)
