"""The caches and the traffic of the benchmark of retention hints."""

from __future__ import annotations

import pytest

from bench.router.retention import Mix, RetainingCache
from router.simulation.generators import BLOCK, Text
from router.simulation.workloads import OpenLoop, SimulatedRequest


def request(name: str) -> SimulatedRequest:
    return Text().then(name, 2 * BLOCK).request(1, name)


@pytest.mark.parametrize(("keep_s", "at", "cached"), [(0.0, 5.0, 0), (10.0, 5.0, 2 * BLOCK - 1), (10.0, 15.0, 0)])
def test_a_prompt_with_a_session_outlives_later_ones_without(keep_s: float, at: float, cached: int) -> None:
    mix = Mix(OpenLoop([(1.0, request("named"))]), OpenLoop([(at, request("one")), (at, request("two"))]))
    cache = RetainingCache(4 * BLOCK, keep_s)
    for now, one in mix.begin():
        cache.take(one, now)
        cache.release(one, now)
    assert cache.take(request("named"), at) == cached
