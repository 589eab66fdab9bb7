"""The usage of Anthropic's Messages: `input_tokens` counts only the uncached part of the prompt.

    the whole prompt = input_tokens + cache_creation_input_tokens + cache_read_input_tokens

A stream reports it in two events, and engines split it differently. vLLM's `message_start` has the whole prompt as
`input_tokens`, and its `message_delta` the three parts; llama.cpp's `message_start` has the parts, and its `message_delta` only
the output. So the events are merged field by field, and the last value of each field counts. A `message_start` without cache
counts is not yet split and is no usage by itself: the client may disconnect before the split comes. `cache_creation` splits the
written tokens by their time in the cache.

Some engines count the cached part in `input_tokens` as well. One of these shows it: `message_start` had the same count and no
split, or `total_tokens` is the sum without the cache. Where neither is there (oMLX), the estimate of the prompt decides
(`counted_once`): an equal number of fresh and cached tokens may be chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.usage import MAX_TOKENS, Usage, token_count

_FRESH: Final = "input_tokens"
_TOTAL: Final = "total_tokens"
_UNSPLIT: Final = "unsplit"  # `input_tokens` of the events without cache counts
_FIELDS: Final = (_FRESH, "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a whole answer; None if it is missing or malformed."""
    usage = answer.get("usage")
    return usage_from(usage) if isinstance(usage, dict) else None


def merge(counts: dict[str, Any], usage: Any) -> bool:
    """Takes over the counts of one more event. True if the event counts the answer's tokens."""
    if isinstance(usage, dict):
        if isinstance(usage.get("cache_creation"), dict):
            counts["cache_creation"] = usage["cache_creation"]
        for name in (*_FIELDS, _TOTAL):
            if token_count(usage.get(name)) is not None:
                counts[name] = usage[name]
        if not is_split(counts):
            counts[_UNSPLIT] = counts.get(_FRESH)
        return token_count(usage.get("output_tokens")) is not None
    return False


def is_split(counts: Mapping[str, Any]) -> bool:
    """True if these counts say how many tokens were read from the cache or written to it."""
    return "cache_creation_input_tokens" in counts or "cache_read_input_tokens" in counts


def usage_from(counts: Mapping[str, Any]) -> Usage | None:
    """The usage of merged counts; None if they are malformed. cached is None without any cache count: missing is not zero."""
    fresh, created, read, completion = (token_count(counts.get(name)) for name in _FIELDS)
    if fresh is None or completion is None:
        return None
    parts = (created or 0) + (read or 0)
    prompt = fresh if _includes(counts, fresh, parts, completion) else fresh + parts
    if prompt > MAX_TOKENS:
        return None
    cached = read if created is None else read or 0
    if not created:
        return Usage(prompt, completion, cached)
    by_ttl = counts.get("cache_creation")
    hours = token_count(by_ttl.get("ephemeral_1h_input_tokens")) if isinstance(by_ttl, dict) else None
    return Usage(prompt, completion, cached, created, min(hours or 0, created))


def _includes(counts: Mapping[str, Any], fresh: int, parts: int, completion: int) -> bool:
    """True if `input_tokens` includes the cached and written parts (see the module)."""
    if not 0 < parts <= fresh:
        return False
    return counts.get(_UNSPLIT) == fresh or counts.get(_TOTAL) == fresh + completion
