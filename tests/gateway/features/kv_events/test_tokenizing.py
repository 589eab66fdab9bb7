"""Kept token ids of prompts."""

from __future__ import annotations

from gateway.features.kv_events.tokenizing import ENTRY_BYTES, KeptTokens


def test_kept_prompts_are_bounded_also_if_they_have_few_tokens() -> None:
    kept = KeptTokens(100 * ENTRY_BYTES)
    for number in range(1000):
        kept.put(number, b"", number.to_bytes(8, "little"))
        kept.put(1000 + number, b"1234", number.to_bytes(8, "big"))
    assert len(kept) < 100
    assert kept.get(1999) == b"1234"
