"""Sums of one process in the last minutes: the values of its counters every STEP_S.

They are read from the counters of /metrics, so requests cost nothing, and the live page has data when it is opened. A sample
costs O(label sets). With many label sets, samples are less frequent, so that they take at most SHARE of the time.

A sample is (time, counts, gauges, buckets): the counts since the process began, in the order of FIELDS; the waiting and running
requests, as GAUGES; the buckets of the time to the first token, without labels. A count may fall when the labels of a departed
replica are dropped; `sample_merger.py` treats this as no change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.telemetry.metrics import Metrics

STEP_S: Final = 2.0
MAX_SAMPLES: Final = 450  # 15 minutes
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
_CODE: Final = 2  # index of the label `code` in the metric of requests
_REPLICA: Final = 1  # indices of labels in the metric of prompt tokens
_CACHE: Final = 2

PoolLoad = tuple[int, int, int]
"""The requests of a pool in this process: waiting, running, limit of running ones."""

Sample = tuple[float, list[float], list[float], list[float]]
"""(time, FIELDS, GAUGES, buckets of the time to the first token)"""


class RollingSums:
    """The samples of one process. replicas: prompt tokens and cached tokens of each replica, at the last sample. spend: seconds
    of some clock, for the cost of a sample.
    """

    def __init__(self, metrics: Metrics, pools: Callable[[], Mapping[str, PoolLoad]], spend: Callable[[], float]) -> None:
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.replicas: dict[str, tuple[float, float]] = {}
        self.pools = pools
        self._metrics = metrics
        self._spend = spend
        self._next = float("-inf")

    def sample(self, now: float) -> bool:
        """Takes a sample if it is due. Returns True if one was taken."""
        if now < self._next:
            return False
        begun = self._spend()
        self.samples.append((now, self._fields(), self._gauges(), self._buckets()))
        self._next = now + max(STEP_S, (self._spend() - begun) / SHARE) - STEP_S / 8  # tolerates a slightly early sweep
        return True

    def since(self, after: float) -> list[Sample]:
        """The samples after that time. O(returned samples)."""
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
        """All prompt tokens, and the cached ones. Also sets `replicas`."""
        replicas: dict[str, tuple[float, float]] = {}
        total = hits = 0.0
        for (replica, kind), count in self._metrics.prompt_tokens.by(_REPLICA, _CACHE).items():
            hit = 0.0 if kind == MISS else count
            prompt, cached = replicas.get(replica, (0.0, 0.0))
            replicas[replica] = prompt + count, cached + hit
            total += count
            hits += hit
        self.replicas = replicas
        return total, hits

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
        return f"<RollingSums, {len(self.samples)} samples>"
