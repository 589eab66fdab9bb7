"""Sums that are read off the counters."""

from __future__ import annotations

import itertools

from gateway.cluster.messages import MessageError
from gateway.features.live_page.feed import Feed
from gateway.features.live_page.sums import FIELDS, MAX_SAMPLES, STEP_S, RollingSums
from gateway.features.live_page.view import LiveView
from gateway.request.running import RunningRequests
from gateway.telemetry.metrics import Metrics


def made(metrics: Metrics, cost_s: float = 0.0) -> RollingSums:
    ticks = itertools.count()
    return RollingSums(metrics, lambda: {"p": (1, 2, 9), "q": (3, 4, 9)}, lambda: next(ticks) * cost_s)


def test_a_sample_has_what_was_counted() -> None:
    metrics = Metrics()
    metrics.requests.add(("m", "chat", "200"), 5)
    metrics.requests.add(("n", "chat", "503"), 2)
    metrics.requests.add(("n", "chat", "429"), 1)
    metrics.prompt_tokens.add(("m", "a", "hit"), 30)
    metrics.prompt_tokens.add(("m", "a", "miss"), 60)
    metrics.prompt_tokens.add(("n", "b", "estimated"), 10)
    metrics.completion_tokens.add(("m", "a"), 7)
    metrics.cost_usd.add(("m", "t", "input"), 0.5)
    metrics.savings_usd.add(("m", "t"), 0.25)
    metrics.ttft_seconds.observe(("m", "chat", "hit"), 0.002)
    sums = made(metrics)
    assert sums.sample(10.0)
    [(time, fields, gauges, buckets)] = sums.since(0.0)
    expected = [8, 2, 1, 100, 40, 7, 0.5, 0.25]
    assert (time, dict(zip(FIELDS, fields, strict=True))) == (10.0, dict(zip(FIELDS, expected, strict=True)))
    assert gauges == [4, 6]
    assert (sum(buckets), buckets[1]) == (1, 1)
    assert sums.replicas == {"a": (90, 30), "b": (10, 10)}
    assert sums.since(10.0) == []


def test_samples_come_in_steps_and_are_bounded() -> None:
    sums = made(Metrics())
    taken = [second for second in range(3 * MAX_SAMPLES) if sums.sample(float(second))]
    assert taken[:3] == [0, 2, 4]
    assert len(sums.samples) == MAX_SAMPLES


def test_where_samples_are_dear_they_are_rare() -> None:
    sums = made(Metrics(), cost_s=0.02)
    assert [second for second in range(25) if sums.sample(float(second))] == [0, 10, 20]
    assert STEP_S < 10


def test_what_is_no_question_is_refused() -> None:
    view = LiveView("p", Feed(lambda: "r"), made(Metrics()), RunningRequests(), lambda: 0.0)
    for raw in (b"", b"x", b"\x80", b"\x81\xa7cursors\x01", b"\x93\x01\x02\x03", b"\xc0"):
        try:
            view.answer(raw, 0.0)
        except MessageError:
            continue
        raise AssertionError(raw)
    assert not view.feed.on
