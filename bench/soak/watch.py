"""Observes a gateway from outside during a soak: latency of /health, memory, files and bookings over time."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import heapq
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from bench.measure.cpu import peak_bytes, rss_bytes, tree
from bench.measure.machine import ROOT
from bench.soak.health import OK, PATIENCE_S, PAUSE_S, Answer
from tests.chaos.stage import Stage
from tests.chaos.wire import port_of

_SURELY_S = 5.0  # without a line of the watcher: it waits for the gateway; less may be this process, which makes all the load
ROWS = 20
SLOWEST = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """second: since the start. health_s: the longest since the last sample; of one that still waits, too, after `_SURELY_S`.

    It counts from the answer before, which is `PAUSE_S` more than the answer took: the gateway was silent for that time.
    """

    second: float
    rss_mb: float
    files: int
    health_s: float


@dataclass(slots=True)
class Watch:
    """health: seconds that each answer of /health took. slowest: the slowest of them, at most `SLOWEST`, the slowest first.

    failed: health requests that were not answered 200, by why. peak_mb: the most resident memory that the gateway's processes
    had, each at its own time.
    """

    stage: Stage
    samples: list[Sample] = field(default_factory=list)
    health: array[float] = field(default_factory=lambda: array("d"))
    slowest: list[Answer] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    peak_mb: float = 0.0
    _begun: float = field(default_factory=time.monotonic)
    _longest: float = 0.0
    _last_answer: float | None = None  # when the last answer came
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # an answer came

    async def health_checks(self) -> None:
        """Until it is cancelled. Raises EOFError if the watcher ends."""
        command = (sys.executable, "-m", "bench.soak.health", str(port_of(self.stage.url)), str(self.stage.gateway.process.pid))
        watcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        assert watcher.stdout
        try:
            async for line in watcher.stdout:
                self._take_answer(Answer.of(line.decode()))
            raise EOFError("bench.soak.health ended")
        finally:
            if watcher.returncode is None:
                watcher.kill()
                await watcher.wait()

    def _take_answer(self, answer: Answer) -> None:
        self._last_answer = time.monotonic()
        self._news.set()
        self.health.append(answer.took_s)
        self.slowest = heapq.nlargest(SLOWEST, [*self.slowest, answer], key=attrgetter("took_s"))
        self._longest = max(self._longest, answer.took_s + PAUSE_S)
        if answer.what != OK:  # with several workers: the one that was killed had it
            self.failed[answer.what] += 1

    async def next_answer(self) -> None:
        """Until the question that is open now is answered, so that it counts; or for `PATIENCE_S`, which count then, too."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._news.wait()

    async def resources(self, every_s: float = 1.0) -> None:
        """Until it is cancelled."""
        while True:
            self.take()
            await asyncio.sleep(every_s)

    def take(self) -> Sample:
        now, pid = time.monotonic(), self.stage.gateway.process.pid
        self.peak_mb = max(self.peak_mb, peak_bytes(pid) / 2**20)
        waiting = now - self._last_answer if self._last_answer is not None else 0.0
        sample = Sample(
            now - self._begun,
            rss_bytes(pid) / 2**20,
            sum(map(open_count, tree(pid))),
            max(self._longest, waiting if waiting > _SURELY_S else 0.0),
        )
        self._longest = 0.0
        self.samples.append(sample)
        return sample

    @property
    def longest_health_s(self) -> float:
        return max((sample.health_s for sample in self.samples), default=0.0)

    def health_percentile(self, share: float) -> float:
        """Seconds; 0 of nothing."""
        ordered = sorted(self.health)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

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
