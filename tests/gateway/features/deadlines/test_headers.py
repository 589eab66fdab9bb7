"""The headers in which clients say how long a request may take."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.features.deadlines.headers import LONGEST_S, queue_time_of, timeout_of


@pytest.mark.parametrize(
    ("text", "seconds"), [("1", 1), (" 30 ", 30), ("0.25", 0.25), ("86400", 86_400), ("0.30000000000000004", 0.3)]
)
def test_a_timeout(text: str, seconds: float) -> None:
    assert timeout_of(text) == pytest.approx(seconds)


BAD = ["", "0", "0.0", "-1", "nan", "inf", "1e3", "5, 10", "30s", "0x10", "٣", "86401", "9" * 400, "1.5.2", "null", "+1", "1_0"]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_an_error_of_the_client(text: str) -> None:
    with pytest.raises(GatewayError) as raised:
        timeout_of(text)
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "invalid_timeout", "X-Request-Timeout")
    assert len(raised.value.message) < 200


@given(st.text(max_size=40))
def test_a_timeout_is_a_possible_one_or_an_error(text: str) -> None:
    with contextlib.suppress(GatewayError):
        assert 0 < timeout_of(text) <= LONGEST_S


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1500ms", 1.5), ("2s", 2), ("1m30s", 90), ("1.5h", 5400), ("100us", 1e-4), ("250ns", 2.5e-7)],
)
def test_a_queue_time(text: str, seconds: float) -> None:
    assert queue_time_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0s", "-1s", "5", "s", "1s 2s", "1sx", "nan", "1d", "1,5s", "9" * 60 + "s"])
def test_any_other_queue_time_is_ignored(text: str) -> None:
    assert queue_time_of(text) is None
