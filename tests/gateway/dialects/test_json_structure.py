from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import json_structure as structure

values = st.recursive(
    st.none() | st.integers() | st.text('a"\\{[,\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\{[,', max_size=4), inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> int:
    """Brackets and commas of a value, found by walking it."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(counted, value))
    return 0


@given(values, st.integers(1, 9))
def test_only_what_is_outside_of_strings_counts_however_it_is_sliced(value: Any, size: int) -> None:
    raw, count = json.dumps(value).encode(), counted(value)
    assert structure.outside_of_strings(raw, 1 << 30, size * 2) == count
    for limit in (count - 1, count, count + 1):
        assert structure.exceeds(raw, limit) is (count > limit)


@pytest.mark.parametrize("raw", [b"", b"\\", b'"', b'"\\', b"\\" * 101, b'"' + b"\\" * 101])
def test_what_is_not_json_is_counted_too(raw: bytes) -> None:
    assert structure.outside_of_strings(raw, 10, 2) == 0


def test_a_long_text_of_signs_is_no_structure() -> None:
    assert not structure.exceeds(json.dumps({"csv": "1,2,[3],{}\n" * 400_000}).encode())
    assert structure.exceeds(b"[" + b"1," * structure.MAX_STRUCTURE + b"1]")
