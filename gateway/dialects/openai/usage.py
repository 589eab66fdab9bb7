"""The usage of OpenAI's chat and completions: `prompt_tokens` includes the cached ones.

It is the member `usage` of the answer, or of its first choice (Moonshot). Cached tokens: `prompt_tokens_details.cached_tokens`
(OpenAI, vLLM, SGLang, llama.cpp), `prompt_cache_hit_tokens` (DeepSeek), `cached_tokens` (Moonshot), `cache_read_input_tokens`
(LiteLLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.usage import Usage, token_count, written_tokens

_CACHED: Final = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")  # beside the details


def parse_usage(answer: dict[str, Any]) -> Usage | None:
    """The usage of an OpenAI-shaped answer or last chunk; None if it is missing or malformed.

    A cached count larger than the prompt is cut to it. Malformed: a count that is no integer or beyond MAX_TOKENS, and a
    missing count of completion tokens in an answer with choices (embeddings have none).
    """
    usage = usage_in(answer)
    if not isinstance(usage, dict):
        return None
    prompt = token_count(usage.get("prompt_tokens"))
    completion = token_count(usage.get("completion_tokens", None if "choices" in answer else 0))
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = _cached_beside(usage)
    cached = None if cached is None else min(cached, prompt)
    return Usage(prompt, completion, cached, written_tokens(details, prompt, cached))


def _cached_beside(usage: Mapping[str, Any]) -> int | None:
    for name in _CACHED:
        if (cached := token_count(usage.get(name))) is not None:
            return cached
    return None


def usage_in(answer: dict[str, Any]) -> Any:
    """The usage as the engine wrote it, unchecked; None if there is none."""
    usage = answer.get("usage")
    if usage is None:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(first, dict):
            return first.get("usage")
    return usage
