"""Entries of prompt logs, by keys: the beginnings of their digests. An outline ends in one large segment, entries do not.

Two requests with named logs are compared entry by entry: the first difference of their logs is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gateway.dialects.prompt.batch import common_length
from gateway.request.named_log import DIGEST

ENTRY_KEY: Final = 8  # bytes of a key
MAX_ENTRIES: Final = 1 << 14  # keys of a request: 128 KiB


def entry_keys(digests: Iterable[bytes]) -> bytes:
    """The keys of a log's first MAX_ENTRIES entries. digests: in pieces, DIGEST bytes each. O(entries)."""
    starts = (piece[at : at + ENTRY_KEY] for piece in digests for at in range(0, len(piece), DIGEST))
    return b"".join(start for start, _ in zip(starts, range(MAX_ENTRIES), strict=False))


def first_entry(now: bytes, before: bytes) -> int:
    """The index of the first entry that differs; -1: unknown, or one log begins with the other. O(entries)."""
    index = common_length(now, before) // ENTRY_KEY
    return index if index < min(len(now), len(before)) // ENTRY_KEY else -1


def entries_after(now: bytes, before: bytes, index: int) -> list[int]:
    """The indexes of entries of `now`, from this one on, that `before` has from there on, too. O(entries)."""
    later = {before[at : at + ENTRY_KEY] for at in range(index * ENTRY_KEY, len(before), ENTRY_KEY)}
    return [at // ENTRY_KEY for at in range(index * ENTRY_KEY, len(now), ENTRY_KEY) if now[at : at + ENTRY_KEY] in later]
