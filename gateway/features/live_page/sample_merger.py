"""Merges samples of several processes into points of one gateway.

Each process samples its counters at its own times (`sums.py`), by a clock that all of them share. Here they are put on one grid
of STEP_S. A count is taken to grow evenly between two samples. So the count of a process in a step is the difference between
the step's ends, and the gateway's is the sum over its processes. A step is made when every process that is not late has a
sample after it. The counts of a late process are added to the next step made after its samples arrive. So nothing is counted
twice or lost, if samples arrive within ENDED_S. A count that falls is treated as unchanged.

The median and the 90th percentile of the time to the first token are interpolated in the buckets of the last TTFT_STEPS steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.features.live_page.sums import FIELDS, GAUGES, MAX_SAMPLES, STEP_S, Sample

LATE_S: Final = 3 * STEP_S  # a process without a sample for this time is not waited for
ENDED_S: Final = 60.0  # a process without a sample for this time is forgotten
TTFT_STEPS: Final = 5

Point = dict[str, Any]


class SampleMerger:
    """bounds: upper ends of the buckets, in seconds. points: the last points, the oldest first."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_SAMPLES)
        self._bounds = tuple(bounds)
        self._processes: dict[str, list[Sample]] = {}
        self._counted: dict[str, Sample] = {}  # by process: the counts included in the steps
        self._end: float | None = None  # end of the last step
        self._ttft: deque[list[float]] = deque(maxlen=TTFT_STEPS)

    def last(self) -> dict[str, float]:
        """The time of the last sample of each process."""
        return {name: samples[-1][0] for name, samples in self._processes.items()}

    def add(self, process: str, samples: Iterable[Sample]) -> None:
        """Adds newer samples of a process."""
        known = self._processes.setdefault(process, [])
        for sample in samples:
            if not known or sample[0] > known[-1][0]:
                known.append(sample)
        if known:
            self._counted.setdefault(process, known[0])
        else:
            del self._processes[process]

    def advance(self) -> list[Point]:
        """Makes the steps that are complete. O(samples)."""
        if not self._processes:
            return []
        newest = max([samples[-1][0] for samples in self._processes.values()])
        prompt = [samples for samples in self._processes.values() if samples[-1][0] >= newest - LATE_S]
        until = math.floor(min([samples[-1][0] for samples in prompt]) / STEP_S) * STEP_S
        if self._end is None:
            oldest = min([samples[0][0] for samples in self._processes.values()])
            self._end = max(math.floor(oldest / STEP_S) * STEP_S, until - MAX_SAMPLES * STEP_S)
            self._counted = {name: _interpolated(samples, self._end) for name, samples in self._processes.items()}
        made: list[Point] = []
        while self._end < until:
            made.append(self._step(self._end + STEP_S))
            self._end += STEP_S
        self.points.extend(made)
        self._forget()
        return made

    def _step(self, end: float) -> Point:
        fields, gauges = [0.0] * len(FIELDS), [0.0] * len(GAUGES)
        buckets = [0.0] * (len(self._bounds) + 1)
        for name, samples in self._processes.items():
            before, after = self._counted[name], _interpolated(samples, end)
            self._counted[name] = after
            for at in range(len(fields)):
                fields[at] += max(0.0, after[1][at] - before[1][at])
            for at in range(len(buckets)):
                buckets[at] += max(0.0, after[3][at] - before[3][at])
            if end <= samples[-1][0]:
                for at in range(len(gauges)):
                    gauges[at] += after[2][at]
        self._ttft.append(buckets)
        recent = [sum([step[at] for step in self._ttft]) for at in range(len(buckets))]
        point: Point = {"time": end, **dict(zip(FIELDS, fields, strict=True)), **dict(zip(GAUGES, gauges, strict=True))}
        point["ttft_p50_s"] = quantile(self._bounds, recent, 0.5)
        point["ttft_p90_s"] = quantile(self._bounds, recent, 0.9)
        return point

    def _forget(self) -> None:
        """Removes samples before the last step, except for the sample that begins the next one."""
        made = self._end if self._end is not None else 0.0
        for name, samples in list(self._processes.items()):
            keep = len(samples) - 1
            while keep > 0 and samples[keep][0] > made:
                keep -= 1
            del samples[:keep]
            if samples[-1][0] < made - ENDED_S:
                del self._processes[name], self._counted[name]

    def __repr__(self) -> str:
        return f"<SampleMerger {len(self._processes)} processes, {len(self.points)} points>"


def _interpolated(samples: Sequence[Sample], time: float) -> Sample:
    """The counts at a time between two samples; outside of them, the counts of the nearest sample. O(log samples)."""
    low, high = 0, len(samples)
    while low < high:
        middle = (low + high) // 2
        if samples[middle][0] < time:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return samples[0]
    if low == len(samples):
        return samples[-1]
    before, after = samples[low - 1], samples[low]
    part = (time - before[0]) / (after[0] - before[0])
    fields = [one + (other - one) * part for one, other in zip(before[1], after[1], strict=True)]
    buckets = [one + (other - one) * part for one, other in zip(before[3], after[3], strict=True)]
    return time, fields, after[2], buckets


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The quantile, interpolated in its bucket; beyond the last bound, that bound. None: nothing was counted."""
    total = sum(counts)
    if total <= 0:
        return None
    remaining = total * share
    for at, bound in enumerate(bounds):
        if counts[at] >= remaining and counts[at] > 0:
            lower = bounds[at - 1] if at else 0.0
            return lower + (bound - lower) * remaining / counts[at]
        remaining -= counts[at]
    return bounds[-1]
