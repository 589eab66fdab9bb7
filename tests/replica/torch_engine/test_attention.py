"""Which answers of a step are computed together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from replica.torch_engine.attention import grouped

pytestmark = pytest.mark.model
SIZE, PADDING, MOST = 16, 12, 64  # tokens of a block; blocks of padding, and of a group


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_groups_have_little_padding_and_are_not_large(lengths: list[int]) -> None:
    single = [(row, length, [0] * -(-length // SIZE)) for row, length in enumerate(lengths)]
    groups = grouped(single, PADDING, MOST)
    assert sorted(one for group in groups for one in group) == sorted(single)
    for group in groups:
        longest = len(group[0][2])
        assert longest == max(len(one[2]) for one in group)
        assert sum(longest - len(one[2]) for one in group) <= PADDING
        assert len(group) * longest <= MOST or len(group) == 1
    assert not lengths or len(groups) <= len(lengths)


def test_as_few_groups_as_can_be() -> None:
    alike = [(row, 64, [0] * 4) for row in range(20)]
    assert [len(group) for group in grouped(alike, PADDING, MOST)] == [16, 4]
    unlike = [(0, 160, [0] * 10), (1, 16, [0]), (2, 16, [0])]
    assert [len(group) for group in grouped(unlike, PADDING, MOST)] == [2, 1]
