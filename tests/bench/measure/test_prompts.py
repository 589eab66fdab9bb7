"""Requests of one length with prompts of their own, at the times of their process."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from bench.measure.prompts import Requests, arrivals


def test_arrivals_have_their_rate() -> None:
    assert list(arrivals(10, 0.5, None)) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    times = list(arrivals(1000, 20, Random(1)))
    assert times == sorted(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert fmean(times) == pytest.approx(10, rel=0.03)
    assert list(arrivals(0, 20, Random(1))) == []


@pytest.mark.parametrize("size", [2000, 32_000])
def test_requests_are_as_long_as_asked_and_distinct_after_a_shared_head(size: int) -> None:
    requests = Requests(size, 0)
    first, second = next(requests), next(requests)
    body = first.partition(b"\r\n\r\n")[2]
    assert size - 20 < len(body) <= size
    assert b"Content-Length: %d\r\n" % len(body) in first
    assert len(first) == len(second)
    shared = next(place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    assert 600 < shared < 900
