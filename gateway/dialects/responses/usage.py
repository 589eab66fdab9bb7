"""The usage of OpenAI's Responses: `input_tokens` includes the cached ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.usage import Usage, token_count, written_tokens


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a response; None if it is missing or malformed. Cached tokens beyond the prompt are cut to it."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = token_count(usage.get("input_tokens")), token_count(usage.get("output_tokens"))
    if prompt is None or completion is None:
        return None
    details = usage.get("input_tokens_details")
    cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    cached = None if cached is None else min(cached, prompt)
    return Usage(prompt, completion, cached, written_tokens(details, prompt, cached))
