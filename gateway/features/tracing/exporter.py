"""Hands finished spans to a collector, in a thread of its own.

    requests ──put──► bounded queue ──► batches ──► `Send` (otlp.py): encodes, compresses, posts, tries again for seconds
                         │ full                        │ not taken
                         └──────────► dropped ◄────────┘          counted, and logged once until it goes well again

Serving never waits for it: `put` appends to a queue, or drops. What it costs is bounded too. Encoding is pure Python, and
takes the interpreter from the event loop: so it is done a request at a time, and after each the thread rests for PAUSES times
what that took. It has at most a quarter of a core, and the loop gets the interpreter back within a millisecond; what is beyond
is dropped. At the end there is a last batch, for which `close` waits a bounded time; the thread does not keep the process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from gateway.features.tracing.span import Span
from gateway.telemetry.metrics import Metrics

log = logging.getLogger("warmroute.traces")

MAX_QUEUED: Final = 1024  # requests whose spans wait; some 8 KB each
BATCH: Final = 64  # requests that are sent at once, at most
BATCH_S: Final = 1.0  # that a batch is collected
PAUSES: Final = 3.0  # rest after some encoding, in times of what it took
MAX_PAUSE_S: Final = 0.05
CLOSE_S: Final = 3.0
MAX_PROBLEM: Final = 600  # characters in the log


class Untaken(NamedTuple):
    """How many spans of a batch the collector has not taken, and why."""

    spans: int
    why: str


Send = Callable[[Iterator[Span], int], Untaken | None]
"""Sends spans (their number is known); None: all are taken. It may raise. The thread calls it."""


class Exporter:
    """See the top of this file. `start` begins the thread. Counts are written by one thread each, and read by any."""

    def __init__(self, send: Send, *, max_queued: int = MAX_QUEUED, batch_s: float = BATCH_S) -> None:
        self._send = send
        self._max_queued = max_queued
        self._batch_s = batch_s
        self._queue: deque[Sequence[Span]] = deque()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False  # of the last batch something was not taken
        self._away = False  # nothing was
        self.exported = 0
        self.failed = 0  # spans that no collector has taken
        self.dropped = 0  # spans for which there was no room

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """The spans of one request. O(1); never blocks."""
        if len(self._queue) >= self._max_queued or self._closing.is_set():
            self.dropped += len(spans)
            return
        self._queue.append(spans)
        if not self._news.is_set():
            self._news.set()

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Send what is queued, but wait no longer than that for it. Idempotent."""
        self._closing.set()
        self._news.set()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, within_s)

    def count(self, metrics: Metrics) -> None:
        """Mirror the counts; called at each scrape."""
        metrics.spans_exported.set((), self.exported)
        metrics.spans_dropped.set(("queue_full",), self.dropped)
        metrics.spans_dropped.set(("failed",), self.failed)

    def _run(self) -> None:
        while True:
            self._news.wait()
            closing = self._closing.wait(self._batch_s)  # meanwhile a batch collects
            self._news.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                if self._away and self._closing.is_set():
                    self.failed += sum(map(len, batch))  # there is no time left for a collector that may be back
                else:
                    self._export(batch)
            if closing:
                return

    def _export(self, batch: list[Sequence[Span]]) -> None:
        count = sum(map(len, batch))
        try:
            untaken = self._send(self._gently(batch), count)
        except Exception as error:  # noqa: BLE001  (of a library: it must not end the thread)
            untaken = Untaken(count, f"{type(error).__name__}: {error}")
        missing = untaken.spans if untaken else 0
        self.exported += count - missing
        self.failed += missing
        if untaken and not self._failing:
            about = {"spans": missing, "of": count, "error": untaken.why[:MAX_PROBLEM]}
            log.warning("traces are not exported; this is said once", extra=about)
        elif self._failing and not untaken:
            log.info("traces are exported again")
        self._failing, self._away = untaken is not None, missing == count

    def _gently(self, batch: list[Sequence[Span]]) -> Iterator[Span]:
        """The spans, with a rest after those of each request, in which the event loop has the interpreter."""
        for spans in batch:
            begun = time.thread_time()
            yield from spans
            if not self._closing.is_set():
                time.sleep(min(MAX_PAUSE_S, PAUSES * (time.thread_time() - begun)))

    def __repr__(self) -> str:
        return f"<Exporter {len(self._queue)} queued, {self.exported} exported, {self.failed + self.dropped} dropped>"
