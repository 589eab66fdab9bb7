"""The exporter's thread: bounded, never in the way of serving, honest about what was lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from gateway.features.table import new_metrics
from gateway.features.tracing.exporter import BATCH, Exporter, Rejection
from gateway.features.tracing.metrics import TracingMetrics
from gateway.features.tracing.span import Span
from tests.gateway.conftest import eventually


def spans(count: int = 3) -> list[Span]:
    return [Span("1" * 32, f"{number + 1:016x}", "", "span", 1, 2) for number in range(count)]


class Sent:
    """A `Send` that keeps what it gets. problem: why it has not taken any, or `untaken` of them; gate: waited for first."""

    def __init__(self) -> None:
        self.batches: list[list[Span]] = []
        self.counts: list[int] = []
        self.problem: str | None = None
        self.untaken: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.busy = threading.Event()

    def __call__(self, made: Iterator[Span], count: int) -> Rejection | None:
        self.busy.set()
        assert self.gate.wait(40)
        self.batches.append(list(made))
        self.counts.append(count)
        if self.problem is None:
            return None
        return Rejection(count if self.untaken is None else self.untaken, self.problem)


async def test_what_is_put_is_sent_at_the_end_at_the_latest() -> None:
    sent = Sent()
    exporter = Exporter(sent, batch_s=1000)
    exporter.start()
    for _ in range(BATCH + 1):
        exporter.put(spans())
    await exporter.close(40)
    assert [len(batch) for batch in sent.batches] == sent.counts == [3 * BATCH, 3]
    assert exporter.exported == 3 * BATCH + 3
    exporter.put(spans())
    assert exporter.dropped == 3
    await exporter.close(40)  # again


async def test_a_batch_is_sent_when_its_time_is_over() -> None:
    sent = Sent()
    exporter = Exporter(sent, batch_s=0.001)
    exporter.start()
    exporter.put(spans())
    await eventually(lambda: exporter.exported == 3)
    exporter.put(spans())
    await eventually(lambda: exporter.exported == 6)
    await exporter.close(40)


async def test_beyond_the_bound_spans_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    sent.gate.clear()
    exporter = Exporter(sent, max_queued=10, batch_s=0.001)
    exporter.start()
    exporter.put(spans())
    await asyncio.to_thread(sent.busy.wait, 40)
    begun = time.monotonic()
    for _ in range(10_000):
        exporter.put(spans())
    assert time.monotonic() - begun < 40  # it did not wait for the thread, which waits for us
    assert exporter.dropped == 3 * 9_990
    assert [record.message.partition(":")[0] for record in caplog.records] == ["spans are dropped"]
    assert "10 queued" in repr(exporter)
    sent.gate.set()
    await exporter.close(40)
    assert exporter.exported == 33
    metrics = new_metrics().of(TracingMetrics)
    exporter.count(metrics)
    assert metrics.dropped.values == {("queue_full",): 3 * 9_990, ("failed",): 0}
    assert metrics.exported.values == {(): 33}


async def test_a_failure_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.traces")
    sent = Sent()
    sent.problem = "no such host"
    exporter = Exporter(sent, batch_s=0.001)
    exporter.start()
    for total in (3, 6, 9):
        exporter.put(spans())
        await eventually(lambda total=total: exporter.failed == total)
    sent.problem = None
    exporter.put(spans())
    await eventually(lambda: exporter.exported)
    await exporter.close(40)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "traces are not exported",
        "traces are exported again",
    ]
    assert vars(caplog.records[0])["error"] == "no such host"


async def test_what_is_rejected_of_a_batch_is_not_exported() -> None:
    sent = Sent()
    sent.problem, sent.untaken = "too old", 2
    exporter = Exporter(sent, batch_s=1000)
    exporter.put(spans(5))
    exporter.start()
    await exporter.close(40)
    assert (exporter.exported, exporter.failed) == (3, 2)


async def test_an_error_of_the_library_does_not_end_the_thread() -> None:
    def broken(made: Iterator[Span], count: int) -> Rejection | None:
        raise ValueError("a bug")

    exporter = Exporter(broken, batch_s=0.001)
    exporter.start()
    exporter.put(spans())
    await eventually(lambda: exporter.failed == 3)
    exporter.put(spans())
    await eventually(lambda: exporter.failed == 6)
    await exporter.close(40)


async def test_the_end_does_not_wait_for_what_hangs() -> None:
    sent = Sent()
    sent.gate.clear()
    exporter = Exporter(sent, batch_s=0.001)
    exporter.start()
    exporter.put(spans())
    assert await asyncio.to_thread(sent.busy.wait, 40)
    await exporter.close(0.01)
    assert (exporter.exported, exporter.failed) == (0, 0), "it hangs still: after 40 s it fails"
    sent.gate.set()
    await exporter.close(40)
    assert (exporter.exported, exporter.failed) == (3, 0)


async def test_after_a_failure_the_end_tries_no_further_batch() -> None:
    sent = Sent()
    sent.problem = "gone"
    exporter = Exporter(sent, batch_s=1000)
    for _ in range(3 * BATCH):
        exporter.put(spans(1))
    exporter.start()
    await exporter.close(40)
    assert len(sent.batches) == 1
    assert exporter.failed == 3 * BATCH


class EndingExporter(Exporter):
    """Its end comes in the moment when its thread has seen none yet, and begins a batch."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent, batch_s=0.001)
        closing = self._closing

        class Queued(threading.Event):
            def clear(self) -> None:
                closing.set()
                self.set()
                super().clear()

        self._queued = Queued()


def test_an_end_in_the_moment_when_a_batch_begins_is_noticed() -> None:
    exporter = EndingExporter(Sent())
    exporter.put(spans())
    exporter.start()
    assert exporter._thread
    exporter._thread.join(40)
    assert (exporter._thread.is_alive(), exporter.exported) == (False, 3)


def test_one_that_was_never_started_can_be_closed() -> None:
    exporter = Exporter(Sent())
    asyncio.run(exporter.close())
    exporter.put(spans())
    assert (exporter.exported, exporter.dropped) == (0, 3), "it is closed: it takes no more"
