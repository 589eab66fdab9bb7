"""Sums of one process, a few minutes back: what the counters had counted every STEP_S.

They are read off the counters of /metrics, so that no request pays for them, and the live page has something to draw when it is
opened. A sample costs O(label sets); where these are many, samples come less often, for SHARE of the time at most.

A sample is (time, values): what has been counted since the process began, in the order of FIELDS, and how many requests wait
and run now, in its GAUGES; `ttft` has the buckets of the histogram, without labels. What falls, because the labels of a replica
that has left are dropped, is taken for a standstill by whoever makes differences (`merging.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.telemetry.metrics import Metrics

STEP_S: Final = 2.0
MOST: Final = 450  # samples: 15 minutes
SHARE: Final = 0.002  # of the time
FIELDS: Final = (
    "requests",
    "errors",
    "refused",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_usd",
    "saved_usd",
)
GAUGES: Final = ("waiting", "running")
MISS: Final = "miss"
_CODE: Final = 2  # the place of this label of requests
_REPLICA: Final = 1  # of prompt tokens
_CACHE: Final = 2

PoolLoad = tuple[int, int, int]
"""Of a pool, in this process: requests that wait, that run, and how many may run."""

Sample = tuple[float, list[float], list[float], list[float]]
"""Time; FIELDS; GAUGES; the buckets of the time to the first token."""


class RollingSums:
    """See the top of this file. replicas: prompt tokens and cached ones of each replica, at the last sample. spend: seconds of
    some clock, for the cost of a sample.
    """

    def __init__(self, metrics: Metrics, pools: Callable[[], Mapping[str, PoolLoad]], spend: Callable[[], float]) -> None:
        self.samples: deque[Sample] = deque(maxlen=MOST)
        self.replicas: dict[str, tuple[float, float]] = {}
        self.pools = pools
        self._metrics = metrics
        self._spend = spend
        self._next = float("-inf")

    def sample(self, now: float) -> bool:
        """Take one if it is due; whether one was taken."""
        if now < self._next:
            return False
        begun = self._spend()
        self.samples.append((now, self._fields(), self._gauges(), self._buckets()))
        self._next = (
            now + max(STEP_S, (self._spend() - begun) / SHARE) - STEP_S / 8
        )  # a sweep that is a little early is in time
        return True

    def since(self, after: float) -> list[Sample]:
        """Those after a time. O(those)."""
        found: list[Sample] = []
        for sample in reversed(self.samples):
            if sample[0] <= after:
                break
            found.append(sample)
        found.reverse()
        return found

    def _fields(self) -> list[float]:
        metrics = self._metrics
        requests = errors = refused = 0.0
        for (code,), count in metrics.requests.by(_CODE).items():
            requests += count
            if code.startswith("5"):
                errors += count
            elif code == "429":
                refused += count
        prompt, cached = self._tokens()
        money = metrics.cost_usd.total(), metrics.savings_usd.total()
        return [requests, errors, refused, prompt, cached, metrics.completion_tokens.total(), *money]

    def _tokens(self) -> tuple[float, float]:
        """Prompt tokens, and those of them that were cached; by replica as well."""
        replicas: dict[str, tuple[float, float]] = {}
        whole = hits = 0.0
        for (replica, kind), count in self._metrics.prompt_tokens.by(_REPLICA, _CACHE).items():
            hit = 0.0 if kind == MISS else count
            prompt, cached = replicas.get(replica, (0.0, 0.0))
            replicas[replica] = prompt + count, cached + hit
            whole += count
            hits += hit
        self.replicas = replicas
        return whole, hits

    def _gauges(self) -> list[float]:
        loads: Sequence[PoolLoad] = list(self.pools().values())
        return [float(sum([load[0] for load in loads])), float(sum([load[1] for load in loads]))]

    def _buckets(self) -> list[float]:
        histogram = self._metrics.ttft_seconds
        sums = [0.0] * (len(histogram.bounds) + 1)
        for row in histogram.values.values():
            for at in range(len(sums)):
                sums[at] += row[at]
        return sums

    def __repr__(self) -> str:
        return f"<Sums, {len(self.samples)} samples>"
