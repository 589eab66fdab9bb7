"""Exports finished spans to a collector, in a thread of its own.

    requests ──put──► bounded queue ──► batches ──► `Send` (otlp.py): encodes, compresses, posts, repeats for seconds
                         │ full                        │ rejected
                         └──────────► dropped ◄────────┘          counted, and logged once until an export succeeds again

Requests never wait for it: `put` appends to the queue, or drops. Encoding is pure Python and takes the interpreter from the
event loop. So the thread encodes one request at a time, and then rests for PAUSES times as long. It uses at most a quarter of a
core, and the loop gets the interpreter back within a millisecond. A collector that hangs or trickles blocks this thread alone:
the queue fills and further spans are dropped. `close` waits a bounded time for a last batch; the thread does not keep the
process alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from gateway.features.tracing.metrics import TracingMetrics
from gateway.features.tracing.span import Span

log = logging.getLogger("warmroute.traces")

MAX_QUEUED: Final = 1024  # requests with waiting spans; some 8 KB each
BATCH: Final = 64  # requests per batch, at most
BATCH_S: Final = 1.0  # time in which a batch collects
PAUSES: Final = 3.0  # rest after encoding, as a multiple of its duration
MAX_PAUSE_S: Final = 0.05
CLOSE_S: Final = 3.0
MAX_REASON: Final = 600  # characters in the log


class Rejection(NamedTuple):
    """Number of a batch's spans that the collector has not stored, and the reason."""

    spans: int
    reason: str


Send = Callable[[Iterator[Span], int], Rejection | None]
"""Sends spans, given their number; None: all are stored. It may raise. The thread calls it."""


class Exporter:
    """Queue and thread. `start` starts the thread. Each count is written by one thread and read by any."""

    def __init__(self, send: Send, *, max_queued: int = MAX_QUEUED, batch_s: float = BATCH_S) -> None:
        self._send = send
        self._max_queued = max_queued
        self._batch_s = batch_s
        self._queue: deque[Sequence[Span]] = deque()
        self._queued = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False  # the last batch was rejected, at least in part
        self.exported = 0
        self.failed = 0  # spans not stored by the collector
        self.dropped = 0  # spans dropped because the queue was full

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Queue the spans of one request, or drop them. O(1); never blocks."""
        if len(self._queue) >= self._max_queued or self._closing.is_set():
            if not self.dropped:
                log.warning("spans are dropped: the queue of the exporter is full (logged once)")
            self.dropped += len(spans)
            return
        self._queue.append(spans)
        if not self._queued.is_set():
            self._queued.set()

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Send the queued spans, and wait for that at most within_s. Idempotent."""
        self._closing.set()
        self._queued.set()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, within_s)

    def count(self, metrics: TracingMetrics) -> None:
        """Copy the counts to the metrics; called at each scrape."""
        metrics.exported.set((), self.exported)
        metrics.dropped.set(("queue_full",), self.dropped)
        metrics.dropped.set(("failed",), self.failed)

    def _run(self) -> None:
        while True:
            self._queued.wait()
            self._closing.wait(self._batch_s)  # a batch collects in the meantime
            self._queued.clear()
            closing = self._closing.is_set()  # asked last: the end sets `_queued` once
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                if self._failing and self._closing.is_set():
                    self.failed += sum(map(len, batch))  # no time is left for another attempt
                else:
                    self._export(batch)
            if closing:
                return

    def _export(self, batch: list[Sequence[Span]]) -> None:
        count = sum(map(len, batch))
        try:
            rejection = self._send(self._with_rests(batch), count)
        except Exception as error:  # noqa: BLE001  (raised by the library: it must not end the thread)
            rejection = Rejection(count, f"{type(error).__name__}: {error}")
        rejected = rejection.spans if rejection else 0
        self.exported += count - rejected
        self.failed += rejected
        if rejection and not self._failing:
            about = {"spans": rejected, "of": count, "error": rejection.reason[:MAX_REASON]}
            log.warning("traces are not exported (logged once)", extra=about)
        elif self._failing and not rejection:
            log.info("traces are exported again")
        self._failing = rejection is not None

    def _with_rests(self, batch: list[Sequence[Span]]) -> Iterator[Span]:
        """Yield the spans, and after each request's spans give the interpreter to the event loop."""
        for spans in batch:
            begun = time.thread_time()
            yield from spans
            if not self._closing.is_set():
                time.sleep(min(MAX_PAUSE_S, PAUSES * (time.thread_time() - begun)))

    def __repr__(self) -> str:
        return f"<Exporter {len(self._queue)} queued, {self.exported} exported, {self.failed + self.dropped} dropped>"
