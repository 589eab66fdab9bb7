"""Numbered blocks: what is written says which prompts begin alike, and nothing else can be written."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.simulation.block_tree import MAX_PROMPT_BLOCKS, BlockNumbers, BlockTree
from router.types import KEY_BYTES
from tests.support.strategies import keys_of, letters

PROMPTS = st.lists(letters, max_size=30)


def common(one: bytes, other: bytes) -> int:
    """Leading blocks that two prompts share, by their keys."""
    pairs = zip(range(0, len(one), KEY_BYTES), range(0, len(other), KEY_BYTES), strict=False)
    return sum(
        1 for _ in itertools.takewhile(lambda at: one[at[0] : at[0] + KEY_BYTES] == other[at[1] : at[1] + KEY_BYTES], pairs)
    )


@given(PROMPTS)
def test_what_is_read_has_the_prefixes_of_what_was_written(prompts: list[bytes]) -> None:
    written, tree = BlockNumbers(), BlockTree()
    keys = [keys_of(prompt) for prompt in prompts]
    ends = [tree.add(*written.add(each)) for each in keys]
    paths = [tree.keys(end) for end in ends]
    for one, path, end in zip(keys, paths, ends, strict=True):
        assert len(one) == len(path)
        assert tree.depth(end) * KEY_BYTES == len(one)
    for (one, first), (other, second) in itertools.combinations(zip(keys, paths, strict=True), 2):
        assert common(one, other) == common(first, second)
    for (one, end), (other, last) in itertools.product(zip(keys, ends, strict=True), repeat=2):
        assert tree.leads_to(end, last) == other.startswith(one)


@given(PROMPTS, st.integers(1, 12))
def test_a_writer_that_forgets_claims_no_more_than_is_true(prompts: list[bytes], known: int) -> None:
    written, tree = BlockNumbers(known), BlockTree()
    keys = [keys_of(prompt) for prompt in prompts]
    paths = [tree.keys(tree.add(*written.add(each))) for each in keys]
    assert len(written) <= 2 * max(1, known // 2)
    for (one, first), (other, second) in itertools.combinations(zip(keys, paths, strict=True), 2):
        assert common(first, second) <= common(one, other)


@given(PROMPTS, st.integers(0, 40), st.integers(1, 3))
def test_copies_share_what_is_said_to_be_shared(prompts: list[bytes], shared: int, copy: int) -> None:
    written, tree = BlockNumbers(), BlockTree()
    for end in [tree.add(*written.add(keys_of(prompt))) for prompt in prompts]:
        one, other = tree.keys(end, shared=shared), tree.keys(end, shared=shared, copy=copy)
        assert common(one, other) == min(shared, len(one) // KEY_BYTES)


@pytest.mark.parametrize(("parent", "new"), [(4, 1), (-1, 1), (0, -1), (3, MAX_PROMPT_BLOCKS), (0, MAX_PROMPT_BLOCKS + 1)])
def test_what_no_writer_writes_is_refused(parent: int, new: int) -> None:
    tree = BlockTree()
    assert tree.add(0, 3) == 3
    with pytest.raises(ValueError, match=r"parent|blocks"):
        tree.add(parent, new)
    assert tree.last == 3
