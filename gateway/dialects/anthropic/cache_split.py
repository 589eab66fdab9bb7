"""Splits the uncached tokens of a prompt into newly written and other ones, for engines that report only cache reads.

    0 ── read ── | ── to the last breakpoint of 1 h ── | ── to the last breakpoint ── | ── the rest ── end
    from engine  |           written, 1 h              |      written, 5 min          |  input_tokens

The engine reports the tokens of the prompt and of the part read from the cache. The positions of breakpoints between them are
known in bytes of the canonical prompt, in whole blocks; the same share of the tokens is assumed. Counts that the engine splits
itself are never changed, and without the engine's count of cached tokens nothing is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.anthropic.usage import usage_from
from gateway.dialects.usage import Usage
from router import Prompt

_HOUR: Final = 3600


class CacheSplit:
    """The parts of a prompt up to its last breakpoint, and up to its last one-hour breakpoint; `last` and `hours` of
    `units`.
    """

    __slots__ = ("hours", "last", "units")

    def __init__(self, last: int, hours: int, units: int) -> None:
        self.last = last
        self.hours = hours
        self.units = units

    def __repr__(self) -> str:
        return f"<Marked {self.last} of {self.units}, {self.hours} for an hour>"


def marked_in(prompt: Prompt) -> CacheSplit | None:
    """The split of a prompt's breakpoints; None if none covers a whole block. O(breakpoints)."""
    last = max((blocks for blocks, seconds in prompt.breakpoints if seconds), default=0)
    if not last:
        return None
    hours = max((blocks for blocks, seconds in prompt.breakpoints if seconds >= _HOUR), default=0)
    return CacheSplit(last * prompt.block_units, hours * prompt.block_units, prompt.units)


def split(counts: Mapping[str, Any], marked: CacheSplit) -> Usage | None:
    """The usage with the written tokens. counts: as the engine reports them, merged over all events so far. None: nothing is to
    be added, because the engine has split the usage itself, does not report cached tokens, or had the whole part in the cache.
    """
    usage = usage_from(counts)
    if usage is None or usage.cached is None or usage.written or isinstance(counts.get("cache_creation"), dict):
        return None
    written = min(usage.prompt, usage.prompt * marked.last // marked.units) - usage.cached
    if written <= 0:
        return None
    hours = max(0, min(written, usage.prompt * marked.hours // marked.units - usage.cached))
    return Usage(usage.prompt, usage.completion, usage.cached, written, hours)


def fields_of(usage: Usage) -> dict[str, Any]:
    """The prompt counts of a split usage, as the client's usage has them. They add up to the engine's prompt tokens."""
    read = usage.cached or 0
    return {
        "input_tokens": usage.prompt - read - usage.written,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": usage.written - usage.hours,
            "ephemeral_1h_input_tokens": usage.hours,
        },
    }
