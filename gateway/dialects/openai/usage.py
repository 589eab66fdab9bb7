"""The usage of OpenAI's chat and completions: `prompt_tokens` includes the cached ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.usage import Usage, token_count, written_tokens


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of an OpenAI-shaped answer or last chunk; None if it is missing or malformed.

    Cached tokens: `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang, llama.cpp), `prompt_cache_hit_tokens`
    (DeepSeek). A count larger than the prompt is cut to it. Malformed: a count that is no integer or beyond MAX_TOKENS, and a
    missing count of completion tokens in an answer with choices (embeddings have none).
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt = token_count(usage.get("prompt_tokens"))
    completion = token_count(usage.get("completion_tokens", None if "choices" in answer else 0))
    if prompt is None or completion is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = token_count(usage.get("prompt_cache_hit_tokens"))
    cached = None if cached is None else min(cached, prompt)
    return Usage(prompt, completion, cached, written_tokens(details, prompt, cached))
