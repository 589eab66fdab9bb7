"""Samples of several processes as points of one gateway: nothing is counted twice, nor lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.features.live_page.sample_merger import ENDED_S, LATE_S, SampleMerger, quantile
from gateway.features.live_page.sums import FIELDS, GAUGES, MAX_SAMPLES, STEP_S, Sample

BOUNDS = (0.1, 1.0)


def sample(time: float, requests: float, waiting: float = 0.0, buckets: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Sample:
    return time, [requests] + [0.0] * (len(FIELDS) - 1), [waiting] + [0.0] * (len(GAUGES) - 1), list(buckets)


def test_the_steps_of_one_process() -> None:
    merging = SampleMerger(BOUNDS)
    assert merging.advance() == []
    merging.add("a", [sample(0.0, 5), sample(2.0, 7), sample(4.0, 13, waiting=3)])
    points = merging.advance()
    assert [(each["time"], each["requests"], each["waiting"]) for each in points] == [(2.0, 2, 0), (4.0, 6, 3)]
    merging.add("a", [sample(4.0, 13), sample(6.5, 18)])
    assert [(each["time"], each["requests"]) for each in merging.advance()] == [(6.0, 4.0)], "evenly between two samples"
    assert merging.last() == {"a": 6.5}
    assert len(merging.points) == 3


def test_samples_that_are_not_newer_are_ignored() -> None:
    merging = SampleMerger(BOUNDS)
    merging.add("a", [sample(0.0, 5), sample(2.0, 7)])
    merging.add("a", [sample(1.0, 500), sample(2.0, 900), sample(4.0, 13)])
    assert [each["requests"] for each in merging.advance()] == [2, 6]


def test_processes_are_added_up_and_late_ones_are_not_waited_for() -> None:
    merging = SampleMerger(BOUNDS)
    merging.add("a", [sample(0.0, 0), sample(4.0, 8)])
    merging.add("b", [sample(0.0, 100), sample(2.0, 101)])
    assert [each["requests"] for each in merging.advance()] == [5.0], "b has not come to the second step yet"
    merging.add("a", [sample(6.0 + LATE_S, 8)])
    assert sum(each["requests"] for each in merging.advance()) == 4.0
    merging.add("a", [sample(20.0 + ENDED_S, 8)])
    merging.advance()
    assert merging.last().keys() == {"a"}, "b has ended"
    merging.add("b", [sample(20.0 + ENDED_S, 500), sample(22.0 + ENDED_S, 501)])
    merging.add("a", [sample(22.0 + ENDED_S, 8)])
    assert [each["requests"] for each in merging.advance()] == [1.0]


def test_what_a_late_process_has_counted_is_in_the_next_step() -> None:
    merging = SampleMerger(BOUNDS)
    for name in "ab":
        merging.add(name, [sample(0.0, 0)])
    last = 3 * LATE_S
    for at in range(1, int(last / STEP_S) + 1):
        merging.add("a", [sample(at * STEP_S, at)])
        merging.advance()
    assert merging.points[-1]["time"] == last
    at = len(merging.points)
    late = [sample(at * STEP_S, 10 * at, buckets=(10.0 * at, 0.0, 0.0)) for at in range(1, int(last / STEP_S) + 2)]
    merging.add("b", late)
    merging.add("a", [sample(last + STEP_S, at)])
    [point] = merging.advance()
    assert sum(each["requests"] for each in merging.points) == at + late[-1][1][0]
    assert point["ttft_p50_s"] is not None


def test_what_falls_stands_still() -> None:
    merging = SampleMerger(BOUNDS)
    merging.add("a", [sample(0.0, 10), sample(2.0, 4), sample(4.0, 6)])
    assert [each["requests"] for each in merging.advance()] == [0.0, 2.0]


def test_a_history_is_bounded() -> None:
    merging = SampleMerger(BOUNDS)
    merging.add("a", [sample(0.0, 0), sample(1e9, 1e6)])
    assert len(merging.advance()) == len(merging.points) == MAX_SAMPLES
    assert merging.points[0]["requests"] == pytest.approx(1e6 * STEP_S / 1e9)


def test_quantiles() -> None:
    assert quantile(BOUNDS, [0, 0, 0], 0.5) is None
    assert quantile(BOUNDS, [10, 0, 0], 0.5) == 0.05
    assert quantile(BOUNDS, [5, 5, 0], 0.9) == pytest.approx(0.1 + 0.9 * 0.8)
    assert quantile(BOUNDS, [0, 0, 3], 0.5) == 1.0
    merging = SampleMerger(BOUNDS)
    merging.add("a", [sample(0.0, 0), sample(2.0, 1, buckets=(10.0, 0.0, 0.0))])
    [point] = merging.advance()
    assert (point["ttft_p50_s"], point["ttft_p90_s"]) == (0.05, 0.09)


@given(st.lists(st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(0, 50)), min_size=2, max_size=20), min_size=1, max_size=3))
def test_the_sum_of_all_steps_is_what_was_counted(processes: list[list[tuple[float, int]]]) -> None:
    """Given sample by sample, in any order among the processes; up to the last step that is made."""
    merging, made = SampleMerger(BOUNDS), 0.0
    whole: list[tuple[float, list[Sample]]] = []
    for at, steps in enumerate(processes):
        time, count, samples = 0.0, 0.0, [sample(0.0, 0.0)]
        for later, more in steps:
            time, count = time + later, count + more
            samples.append(sample(time, count))
        samples.append(sample(time + 200.0, count))  # so that nobody is late
        whole.append((at, samples))
    for at, samples in whole:
        merging.add(str(at), samples[:1])
    for at, samples in whole:
        merging.add(str(at), samples[1:])
    made = sum(each["requests"] for each in merging.advance())
    until = merging.points[-1]["time"]
    counted = sum(max(each[1][0] for each in samples if each[0] <= until) for _, samples in whole)
    between = sum(samples[-1][1][0] for _, samples in whole)
    assert counted - 1e-6 <= made <= between + 1e-6
    assert until % STEP_S == 0
