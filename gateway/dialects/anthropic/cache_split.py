"""What a prompt newly wrote to the cache, where its engine reports only what it read from there.

    0 ── read ── | ── to the last breakpoint of 1 h ── | ── to the last breakpoint ── | ── the rest ── end
    engine's word|           written, 1 h              |      written, 5 min          |  input_tokens

The sizes of the prompt and of the part that was read are the engine's. Where a breakpoint is in between is known in bytes of
the canonical prompt, in whole blocks, and taken for the same share of the tokens. What the engine splits itself is never
changed, and without its word on what was cached nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.anthropic.usage import usage_from
from gateway.dialects.usage import Usage
from router import Prompt

_HOUR: Final = 3600


class CacheSplit:
    """How much of a prompt is before the last breakpoint, and before the last one of an hour; of `units`."""

    __slots__ = ("hours", "last", "units")

    def __init__(self, last: int, hours: int, units: int) -> None:
        self.last = last
        self.hours = hours
        self.units = units

    def __repr__(self) -> str:
        return f"<Marked {self.last} of {self.units}, {self.hours} for an hour>"


def marked_in(prompt: Prompt) -> CacheSplit | None:
    """None: nothing is marked, or less than a block. O(breakpoints)."""
    last = max((blocks for blocks, seconds in prompt.breakpoints if seconds), default=0)
    if not last:
        return None
    hours = max((blocks for blocks, seconds in prompt.breakpoints if seconds >= _HOUR), default=0)
    return CacheSplit(last * prompt.block_units, hours * prompt.block_units, prompt.units)


def split(counts: Mapping[str, Any], marked: CacheSplit) -> Usage | None:
    """The usage with what was written. counts: as the engine reports them, of all events so far. None: nothing is to be added:
    the engine has split it itself, does not report what was cached, or had all of it in the cache.
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
    """Of a split usage: what the client's usage has of the prompt. They add up to the engine's prompt."""
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
