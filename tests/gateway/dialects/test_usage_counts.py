"""A count of an answer's tokens that cannot be believed, or is missing, is no zero: what it costs is estimated then."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.anthropic.usage import merge, usage_from
from gateway.dialects.openai import usage as chat
from gateway.dialects.responses import usage as responses
from gateway.dialects.usage import Usage, counted_once

UNBELIEVABLE: tuple[Any, ...] = (-7, "5", 3.0, None, True, [], 10**15)


@pytest.mark.parametrize("count", UNBELIEVABLE)
def test_a_count_that_is_none_makes_no_usage(count: Any) -> None:
    assert chat.parse_usage({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": count}}) is None
    assert responses.parse_usage({"usage": {"input_tokens": 10, "output_tokens": count}}) is None
    assert usage_from({"input_tokens": 10, "output_tokens": count}) is None


def test_a_missing_count_makes_none_where_there_is_an_answer() -> None:
    assert chat.parse_usage({"choices": [], "usage": {"prompt_tokens": 10, "total_tokens": 500_010}}) is None
    assert responses.parse_usage({"usage": {"input_tokens": 10}}) is None
    assert usage_from({"input_tokens": 10}) is None
    assert chat.parse_usage({"data": [], "usage": {"prompt_tokens": 10, "total_tokens": 10}}) == Usage(10, 0)


def chat_usage(**more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 100, "completion_tokens": 5, **more}


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [], "usage": chat_usage(prompt_tokens_details={"cached_tokens": 64})},
        {"choices": [{"delta": {}, "usage": chat_usage(cached_tokens=64)}]},
        {"choices": [{"delta": {}}], "usage": chat_usage(cached_tokens=64, prompt_tokens_details=None)},
        {"choices": [], "usage": chat_usage(prompt_cache_hit_tokens=64, prompt_cache_miss_tokens=36)},
        {"choices": [], "usage": chat_usage(cache_read_input_tokens=64)},
        {"choices": [{"delta": {}, "usage": chat_usage(prompt_tokens=1)}], "usage": chat_usage(cached_tokens=64)},
    ],
)
def test_each_place_of_a_chats_counts_is_known(answer: dict[str, Any]) -> None:
    assert chat.parse_usage(answer) == Usage(100, 5, 64)


READ = {"cache_read_input_tokens": 8831, "output_tokens": 20}


@pytest.mark.parametrize(
    ("events", "prompt"),
    [
        ([{"input_tokens": 18, **READ}], 8849),
        ([{"input_tokens": 8849, "output_tokens": 0}, {"input_tokens": 18, **READ}], 8849),
        ([{"input_tokens": 8849, "output_tokens": 0}, {"input_tokens": 8849, **READ}], 8849),
        ([{"input_tokens": 8849, "total_tokens": 8869, **READ}], 8849),
        ([{"input_tokens": 8849, **READ}], 17_680),
        ([{"input_tokens": 8849, "cache_read_input_tokens": 0, "output_tokens": 0}, {"input_tokens": 8849, **READ}], 17_680),
    ],
    ids=["apart", "apart, late", "included, late", "included, total", "unknown", "apart from the start"],
)
def test_cached_tokens_that_the_prompts_count_includes_count_once(events: list[dict[str, Any]], prompt: int) -> None:
    counts = dict[str, Any]()
    for usage in events:
        merge(counts, usage)
    found = usage_from(counts)
    assert found
    assert (found.prompt, found.cached) == (prompt, 8831)


@pytest.mark.parametrize(
    ("usage", "estimate", "prompt"),
    [
        (Usage(17_680, 20, 8831), 9000, 8849),
        (Usage(17_680, 20, 8831), 7000, 8849),
        (Usage(17_680, 20, 8831), 17_000, 17_680),
        (Usage(17_680, 20, 8831), 14_000, 17_680),
        (Usage(17_680, 20, 8831), 5000, 17_680),
        (Usage(8849, 20, 8831), 9000, 8849),
        (Usage(17_680, 20, 4000), 9000, 17_680),
        (Usage(17_680, 20, 0), 9000, 17_680),
    ],
)
def test_a_prompt_that_is_counted_twice_is_known_by_its_estimate(usage: Usage, estimate: int, prompt: int) -> None:
    assert counted_once(usage, estimate).prompt == prompt


def test_what_was_written_is_a_part_of_a_prompt_that_is_counted_twice() -> None:
    assert counted_once(Usage(17_698, 20, 8831, 18, 9), 9000) == Usage(8849, 20, 8831, 18, 9)
