"""Bars of block characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.top.bars import bars, gauge

VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1e12)), max_size=50)


@given(VALUES, st.integers(0, 40), st.integers(1, 4))
def test_all_lines_are_as_wide_as_was_asked(values: list[float | None], width: int, height: int) -> None:
    lines = bars(values, width, height)
    assert [len(line) for line in lines] == [width] * height


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=40), st.integers(1, 4))
def test_a_higher_value_has_a_bar_that_is_not_lower(values: list[float], height: int) -> None:
    lines = bars(values, len(values), height)
    heights = [sum(" ▁▂▃▄▅▆▇█".index(line[at]) for line in lines) for at in range(len(values))]
    for one, low in zip(values, heights, strict=True):
        for other, high in zip(values, heights, strict=True):
            assert one > other or low <= high
        assert (one > 0) == (low > 0)


def test_pictures() -> None:
    assert bars([0, 1, 2, None, 4], 6) == ["  ▂▄ █"]
    assert bars([1, 2], 2, 2) == [" █", "██"]
    assert gauge(0.5, 8) == "████░░░░"
    assert gauge(7, 4) == "████"
    assert gauge(None, 3) == "   "
