"""Token counts of one answer, as its engine reported them. Every dialect reads its own form of them into a `Usage`."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

MAX_TOKENS: Final = 1_000_000_000  # of one answer; an engine that reports more is not believed


class Usage(NamedTuple):
    """Tokens of one answer as the engine counted them. prompt includes cached; cached is None where it is not reported."""

    prompt: int
    completion: int
    cached: int | None = None


def token_count(value: Any) -> int | None:
    """A count that can be believed: an integer from 0 to MAX_TOKENS; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None
