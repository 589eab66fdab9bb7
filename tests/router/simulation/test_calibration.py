"""Speeds and measured values of a recording."""

from __future__ import annotations

import random

import pytest

from router.simulation.calibration import Speed, measured, speed_of
from router.simulation.recorded import RecordedRequest, RecordedTraffic, read
from tests.router.simulation.test_recorded import HEADER, line


def fleet(prefill: float, decode: float, latency: float, *, gap: float, count: int = 200) -> RecordedTraffic:
    """Two replicas that compute one prompt after the other."""
    chance, free, rows, now = random.Random(1), {1: 0.0, 2: 0.0}, [HEADER], 0.0
    for number in range(count):
        now += chance.expovariate(1 / gap)
        tokens, cached, replica = chance.randrange(200, 2000), chance.randrange(150), chance.choice([1, 2])
        free[replica] = done = max(now, free[replica]) + (tokens - cached) / prefill
        ttft, out = done - now + latency, chance.randrange(2, 100)
        more = {"seconds": ttft + (out - 1) / decode, "ttft": ttft, "cached": cached, "out": out, "replica": replica}
        rows.append(line(now, (0, 0), tokens, chain=number, **more))
    return read(rows)


@pytest.mark.parametrize("gap", [20.0, 1.0])
def test_the_rates_are_found_idle_or_busy(gap: float) -> None:
    speed = speed_of(fleet(1000.0, 40.0, 0.03, gap=gap).requests)
    assert speed.prefill_rate == pytest.approx(1000.0, rel=0.02)
    assert speed.decode_rate == pytest.approx(40.0, rel=0.01)
    assert speed.latency_s == pytest.approx(0.03, abs=0.01)


def test_where_replicas_are_never_idle_the_rate_is_that_of_their_work() -> None:
    speed = speed_of(fleet(1000.0, 40.0, 0.0, gap=0.1).requests)
    assert speed.prefill_rate == pytest.approx(1000.0, rel=0.02)


def test_nothing_is_made_up() -> None:
    assert speed_of([]) == Speed(None, None, 0.0)
    plain = read([HEADER, *(line(float(at), (0, 6), 100, ttft=None) for at in range(50))])
    assert speed_of(plain.requests) == Speed(None, None, 0.0)
    assert measured(plain.requests, 4, 1000) is None
    same = read([HEADER, *(line(float(at), (0, 6), 100, ttft=0.0) for at in range(50))])
    assert speed_of(same.requests).prefill_rate is None


def test_measured_are_the_streams_waits_and_the_reported_hits() -> None:
    rows = [
        line(0.0, (0, 6), 100, cached=50),
        line(1.0, (0, 0), 300, cached=None),
        line(2.0, (0, 0), 100, ttft=None, cached=10),
    ]
    found = measured(read([HEADER, *rows]).requests, 4, 1000)
    assert found is not None
    assert (found.requests, found.hit_ratio, found.ttft_mean_s, found.e2e_mean_s) == (3, 0.3, 0.5, 1.0)
    everything: list[RecordedRequest] = read([HEADER, *rows]).requests
    assert found == measured(everything, 4, 1000)
