"""Prompts of completions and embeddings, which may be batches, and of rerankers.

An engine makes a sequence of each element of a batch, so the size of a request is the sum of all elements. A replica that has
one element cached has only the common beginning of the others, so the block keys cover the common beginning: nearly the
whole text for questions below one long text, nothing for documents to be embedded. Then the least loaded replica is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.dialects.api_request import NeedsHelper
from gateway.errors import GatewayError, bad_request

SizedPrompt = tuple[bytes | list[int], int]
"""A prompt as text or token ids, and the size of the whole request in bytes or ids."""

_MAX_TOKEN_ID: Final = (1 << 32) - 1
_PAIRS: Final = (("query", "documents"), ("queries", "documents"), ("query", "texts"), ("text_1", "text_2"))


def sized_prompt(body: Mapping[str, Any], key: str, most: int = 0) -> SizedPrompt:
    """The prompt of a completion or embedding request (of a batch the common beginning), and the size of all elements.

    most: maximum number of elements; beyond it NeedsHelper is raised. 0: no maximum. Raises GatewayError 400. O(size).
    """
    prompt = body.get(key)
    if isinstance(prompt, str):
        text = prompt.encode()
        return text, len(text)
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt(key)
    if isinstance(prompt[0], str):
        _require_few(prompt, most)
        if not all(isinstance(each, str) for each in prompt):
            raise _bad_prompt(key)
        return common_text(min(prompt), max(prompt)), sum(map(_bytes_of, prompt))
    if isinstance(prompt[0], list):
        _require_few(prompt, most)
        if not all(map(_is_tokens, prompt)):
            raise _bad_prompt(key)
        return common_tokens(min(prompt), max(prompt)), sum(map(len, prompt))
    if not _is_tokens(prompt):
        raise _bad_prompt(key)
    return prompt, len(prompt)


def is_batch(prompt: Any) -> bool:
    """True if the prompt of a completion is a list of several prompts."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def pairs_prompt(body: Mapping[str, Any], most: int = 0) -> SizedPrompt | None:
    """The query of a reranking or scoring request as its prompt, and the size of all its pairs: a single query counts once for
    each document. None: the body is no such request. O(size).
    """
    for first, second in _PAIRS:
        if first in body and second in body:
            queries, documents = _texts(body[first], most), _texts(body[second], most)
            if queries is None or documents is None:
                return None
            size, other = sum(map(_bytes_of, queries)), sum(map(_bytes_of, documents))
            if len(queries) == 1:
                return queries[0].encode(), size * max(1, len(documents)) + other
            return b"", size + (other * len(queries) if len(documents) == 1 else other)
    return None


def common_text(first: str, last: str) -> bytes:
    """The common beginning of two texts. For the least and the greatest of many texts: that of all of them."""
    return first[: common_length(first, last)].encode()


def common_tokens(first: list[int], last: list[int]) -> list[int]:
    """The common beginning of two lists of token ids."""
    return first[: common_length(first, last)]


def common_length(first: Sequence[Any], last: Sequence[Any]) -> int:
    """The length of the common beginning, by bisection; equal parts are compared once. O(length)."""
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _texts(value: Any, most: int) -> list[str] | None:
    """The texts of a text, or of a list of texts or of objects with a text; None: it is neither."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return None
    _require_few(value, most)
    found = [each.get("text") if isinstance(each, dict) else each for each in value]
    return [each for each in found if isinstance(each, str)]


def _require_few(values: Sequence[Any], most: int) -> None:
    if most and len(values) > most:
        raise NeedsHelper


def _is_tokens(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in value)


def _bytes_of(text: str) -> int:
    """The length in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _bad_prompt(key: str) -> GatewayError:
    return bad_request(f"'{key}' must be a string, a list of strings, a list of token ids, or a list of such lists.", key)
