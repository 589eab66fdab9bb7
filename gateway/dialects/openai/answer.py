"""The usage in OpenAI's answers, plain ones and the events of streams.

The usage of a plain answer that is too large to be parsed is looked for in its last TAIL bytes: engines write it behind the
choices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.dialect import AnswerTail
from gateway.dialects.usage import MAX_TOKENS, Usage, token_count
from gateway.errors import ReplicaFailure

MAX_PARSED_ANSWER: Final = 256 << 10  # bytes; what a larger one holds could stop the event loop
TAIL: Final = 64 << 10  # bytes

_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]*:[ \t\r\n]*(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of an OpenAI-shaped answer or last chunk, None if it has none that makes sense.

    Cached tokens: `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang, llama.cpp), `prompt_cache_hit_tokens`
    (DeepSeek). A count beyond the prompt is cut to it. A count beyond MAX_TOKENS makes no sense.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = token_count(usage.get("prompt_tokens")), usage.get("completion_tokens")
    if prompt is None or (isinstance(completion, int) and completion > MAX_TOKENS):
        return None
    details = usage.get("prompt_tokens_details")
    cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = token_count(usage.get("prompt_cache_hit_tokens"))
    return Usage(prompt, token_count(completion) or 0, None if cached is None else min(cached, prompt))


def usage_of(body: bytes) -> Usage | None:
    """The usage in a whole answer. Raises ReplicaFailure if the answer is no JSON object: no engine answers so."""
    if len(body) > MAX_PARSED_ANSWER:
        _require_object(body)
        if not body[-64:].rstrip().endswith(b"}"):
            raise ReplicaFailure("garbage", "the answer is no JSON object")
        return _usage_in(body[-TAIL:])
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return parse_usage(answer)


class UsageTail(AnswerTail):
    """The last bytes of a large answer. At most 2 * TAIL bytes are held. O(bytes)."""

    def __init__(self, begin: bytes) -> None:
        """begin: the first bytes of the answer. Raises ReplicaFailure if they are not the beginning of a JSON object."""
        _require_object(begin)
        self._tail = bytearray(begin[-TAIL:])

    def feed(self, data: bytes) -> None:
        self._tail += data[-TAIL:]
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]

    def usage(self) -> Usage | None:
        """None: there is none in the last TAIL bytes."""
        return _usage_in(bytes(self._tail[-TAIL:]))


def _require_object(begin: bytes) -> None:
    if not begin[:64].lstrip().startswith(b"{"):
        raise ReplicaFailure("garbage", "the answer is no JSON object")


def _usage_in(tail: bytes) -> Usage | None:
    found = _USAGE.findall(tail)
    try:
        return parse_usage({"usage": orjson.loads(found[-1])}) if found else None
    except orjson.JSONDecodeError:
        return None
