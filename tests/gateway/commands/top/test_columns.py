"""Which columns have room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.top.columns import PADDING, Column, fitted

SOME = st.builds(Column, st.just("c"), st.integers(1, 20), st.integers(0, 9), st.booleans(), st.booleans())
COLUMNS = st.lists(SOME, min_size=1, max_size=12)


@given(COLUMNS, st.integers(0, 200), st.lists(st.integers(0, 60), min_size=12, max_size=12))
def test_they_fit_and_fill(columns: list[Column], width: int, wanted: list[int]) -> None:
    chosen = fitted(columns, width, wanted)
    assert [at for at, _ in chosen] == sorted({at for at, _ in chosen})
    taken = sum(each + PADDING for _, each in chosen)
    assert chosen
    if len(chosen) > 1:
        assert taken <= width
    if taken <= width and any(columns[at].grows for at, _ in chosen):
        assert taken == width
    assert all(each >= columns[at].width for at, each in chosen)
    gone = [column.rank for at, column in enumerate(columns) if at not in dict(chosen)]
    assert max((columns[at].rank for at, _ in chosen), default=0) <= min(gone, default=99)


def test_what_is_in_them_comes_first() -> None:
    columns = [Column("a", 4, grows=True), Column("b", 4, grows=True), Column("c", 3)]
    assert fitted(columns, 26, [10, 4, 0]) == [(0, 12), (1, 5), (2, 3)]
