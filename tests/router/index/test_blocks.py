from __future__ import annotations

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.blocks import KEPT_CHARS, KEPT_SEEDS, seed, shared_blocks, text_keys, token_keys
from router.types import KEY_BYTES


def shared_prefix(left: bytes, right: bytes) -> int:
    return next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right)))


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 7))
def test_prompts_share_as_many_keys_as_leading_full_blocks(head: bytes, one: bytes, two: bytes, block: int) -> None:
    left, right = head + one, head + two
    keys = text_keys(left, block, 1), text_keys(right, block, 1)
    assert [len(key) // KEY_BYTES for key in keys] == [len(left) // block, len(right) // block]
    assert shared_blocks(*keys) == shared_prefix(left, right) // block


def test_the_partial_last_block_has_no_key() -> None:
    assert text_keys(b"abcdefg", 4, 0) == text_keys(b"abcd", 4, 0)
    assert text_keys(b"abc", 4, 0) == b""


def test_seeds_keep_models_and_salts_apart() -> None:
    seeds = [seed(("m", "a")), seed(("m", "b")), seed(("ma", "")), seed(("m", "", "a")), seed(("m",))]
    assert len({text_keys(b"same text", 4, value) for value in seeds}) == len(seeds)
    assert seed(("m", "a")) == seed(("m", "a"))
    assert seed(("m", "x" * 10**6)) == seed(("m", "x" * 10**6)) != seed(("m", "x" * (10**6 + 1)))


def test_no_name_however_long_is_kept() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(3 * KEPT_SEEDS):
            seed(("m", f"{number}" + "x" * 20_000))
            seed(("m", f"{number}" + "\N{GRINNING FACE}" * (KEPT_CHARS - 10)))
        assert tracemalloc.get_traced_memory()[0] < 3 << 20
    finally:
        tracemalloc.stop()


def test_token_ids_share_keys_like_text() -> None:
    keys = token_keys([1, 2, 3, 4, 5, 6, 7], 2, 9)
    assert len(keys) == 3 * KEY_BYTES
    assert shared_blocks(keys, token_keys([1, 2, 3, 4, 500], 2, 9)) == 2


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["1"], [1.5]])
def test_an_id_out_of_range_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids are integers"):
        token_keys(ids, 1, 0)
