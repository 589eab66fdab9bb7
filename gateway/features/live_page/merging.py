"""Samples of several processes, as points of one gateway.

Each process samples its counters when it comes to it (`sums.py`), on a clock that all of them share. Here they are put on one
grid of STEP_S: a process's count between two of its samples is taken to grow evenly, so what it counts in a step is the
difference at the step's ends, and the gateway's is the sum over its processes. A step is made when every process that is not
late has a sample behind it; what a late one has counted meanwhile is in the step that is made next after its samples come. So
nothing is counted twice, nor lost, whenever they come, within ENDED_S. A count that falls stands still.

The median and the 90th percentile of the time to the first token are interpolated in the buckets of the last TTFT_STEPS steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.features.live_page.sums import FIELDS, GAUGES, MOST, STEP_S, Sample

LATE_S: Final = 3 * STEP_S  # a process without a sample for so long is not waited for
ENDED_S: Final = 60.0  # and after this it is forgotten
TTFT_STEPS: Final = 5

Point = dict[str, Any]


class Merging:
    """See the top of this file. bounds: upper ends of the buckets, in seconds. points: the last ones, oldest first."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.points: deque[Point] = deque(maxlen=MOST)
        self._bounds = tuple(bounds)
        self._processes: dict[str, list[Sample]] = {}
        self._counted: dict[str, Sample] = {}  # what of each process is in the steps
        self._made: float | None = None  # the end of the last step
        self._ttft: deque[list[float]] = deque(maxlen=TTFT_STEPS)

    def last(self) -> dict[str, float]:
        """The time of the last sample of each process."""
        return {name: samples[-1][0] for name, samples in self._processes.items()}

    def add(self, process: str, samples: Iterable[Sample]) -> None:
        """Newer ones of a process."""
        known = self._processes.setdefault(process, [])
        for sample in samples:
            if not known or sample[0] > known[-1][0]:
                known.append(sample)
        if known:
            self._counted.setdefault(process, known[0])
        else:
            del self._processes[process]

    def advance(self) -> list[Point]:
        """The steps that can be made now. O(samples)."""
        if not self._processes:
            return []
        newest = max([samples[-1][0] for samples in self._processes.values()])
        prompt = [samples for samples in self._processes.values() if samples[-1][0] >= newest - LATE_S]
        until = math.floor(min([samples[-1][0] for samples in prompt]) / STEP_S) * STEP_S
        if self._made is None:
            oldest = min([samples[0][0] for samples in self._processes.values()])
            self._made = max(math.floor(oldest / STEP_S) * STEP_S, until - MOST * STEP_S)
            self._counted = {name: _at(samples, self._made) for name, samples in self._processes.items()}
        made: list[Point] = []
        while self._made < until:
            made.append(self._step(self._made + STEP_S))
            self._made += STEP_S
        self.points.extend(made)
        self._forget()
        return made

    def _step(self, end: float) -> Point:
        fields, gauges = [0.0] * len(FIELDS), [0.0] * len(GAUGES)
        buckets = [0.0] * (len(self._bounds) + 1)
        for name, samples in self._processes.items():
            before, after = self._counted[name], _at(samples, end)
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
        """What is behind the last step, but for the sample that begins the next one."""
        made = self._made if self._made is not None else 0.0
        for name, samples in list(self._processes.items()):
            keep = len(samples) - 1
            while keep > 0 and samples[keep][0] > made:
                keep -= 1
            del samples[:keep]
            if samples[-1][0] < made - ENDED_S:
                del self._processes[name], self._counted[name]

    def __repr__(self) -> str:
        return f"<Merging {len(self._processes)} processes, {len(self.points)} points>"


def _at(samples: Sequence[Sample], time: float) -> Sample:
    """What was counted at a time, between two samples; what is outside of them is as at the nearest. O(log samples)."""
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
    """Interpolated within its bucket; of what is beyond the last bound, that. None: nothing was counted."""
    whole = sum(counts)
    if whole <= 0:
        return None
    left = whole * share
    for at, bound in enumerate(bounds):
        if counts[at] >= left and counts[at] > 0:
            lower = bounds[at - 1] if at else 0.0
            return lower + (bound - lower) * left / counts[at]
        left -= counts[at]
    return bounds[-1]
