"""A count of an answer's tokens that cannot be believed, or is missing, is no zero: what it costs is estimated then."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.anthropic.usage import usage_from
from gateway.dialects.openai import usage as chat
from gateway.dialects.responses import usage as responses
from gateway.dialects.usage import Usage

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
