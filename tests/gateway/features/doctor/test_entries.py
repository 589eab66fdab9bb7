"""Entries of prompt logs, compared by keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.features.doctor.entries import ENTRY_KEY, MAX_ENTRIES, entries_after, entry_keys, first_entry
from gateway.request.named_log import DIGEST

NUMBERS = st.lists(st.integers(0, 3), max_size=12)


def digests(entries: list[int]) -> bytes:
    return b"".join(entry.to_bytes(1, "big") * DIGEST for entry in entries)


@given(NUMBERS, NUMBERS, st.integers(0, 12))
def test_first_differences_and_later_equal_entries_are_those_of_lists(now: list[int], before: list[int], cut: int) -> None:
    keys, keys_before = entry_keys([digests(now[:cut]), digests(now[cut:])]), entry_keys([digests(before)])
    assert len(keys) == ENTRY_KEY * len(now)
    pairs = enumerate(zip(now, before, strict=False))
    assert first_entry(keys, keys_before) == next((at for at, (one, other) in pairs if one != other), -1)
    wanted = [at for at in range(len(now)) if at >= cut and now[at] in before[cut:]]
    assert entries_after(keys, keys_before, cut) == wanted


def test_the_keys_of_a_request_are_bounded() -> None:
    assert len(entry_keys([digests([1]) * MAX_ENTRIES, digests([2])])) == ENTRY_KEY * MAX_ENTRIES
