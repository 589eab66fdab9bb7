"""What a gateway looks like from outside while it is soaked: its health's latency, memory, files and bookings, over time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.cpu import rss_bytes
from tests.chaos.stage import Stage
from tests.chaos.wire import fetch

HEALTH_S = 0.1
ROWS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """second: since the start. health_s: the longest since the last sample, of one that still waits too."""

    second: float
    rss_mb: float
    files: int
    health_s: float


@dataclass(slots=True)
class Watch:
    """failed: health requests that were not answered 200, by why."""

    stage: Stage
    samples: list[Sample] = field(default_factory=list)
    health: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    _begun: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _asked: float | None = None

    async def health_checks(self) -> None:
        """On connections of their own, until it is cancelled."""
        while True:
            self._asked = time.monotonic()
            try:
                answer = await fetch(self.stage.url, "/health")
                if answer.status != 200:
                    self.failed[str(answer.status)] += 1
            except (OSError, EOFError) as error:  # with several workers: the one that was killed had it
                self.failed[type(error).__name__] += 1
            self._longest = max(self._longest, time.monotonic() - self._asked)
            self._asked, self.health = None, self.health + 1
            await asyncio.sleep(HEALTH_S)

    async def resources(self, every_s: float = 1.0) -> None:
        """Until it is cancelled."""
        while True:
            self.take()
            await asyncio.sleep(every_s)

    def take(self) -> Sample:
        now = time.monotonic()
        waiting = now - self._asked if self._asked is not None else 0.0
        sample = Sample(
            now - self._begun,
            rss_bytes(self.stage.gateway.process.pid) / 2**20,
            sum(map(open_count, self.stage.pids)),
            max(self._longest, waiting),
        )
        self._longest = 0.0
        self.samples.append(sample)
        return sample

    @property
    def longest_health_s(self) -> float:
        return max((sample.health_s for sample in self.samples), default=0.0)

    @property
    def peak_mb(self) -> float:
        return max((sample.rss_mb for sample in self.samples), default=0.0)

    def rows(self) -> list[Sample]:
        """At most `ROWS` samples: each the worst of its part of the time."""
        size = max(1, -(-len(self.samples) // ROWS))
        return [worst(self.samples[at : at + size]) for at in range(0, len(self.samples), size)]


def worst(samples: Sequence[Sample]) -> Sample:
    return Sample(
        samples[-1].second,
        max(sample.rss_mb for sample in samples),
        max(sample.files for sample in samples),
        max(sample.health_s for sample in samples),
    )


def open_count(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except FileNotFoundError:  # it ended meanwhile
        return 0
