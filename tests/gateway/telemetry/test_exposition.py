"""The metrics page in slices: the same text as prometheus_client's, and the event loop turns between two of them."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from gateway.telemetry.counters import Counter, Gauge, Instrument
from gateway.telemetry.exposition import (
    SLICE,
    SingleFlight,
    merge,
    pack,
    packed,
    packed_slices,
    render,
    text_slices,
    unpacked_slices,
)
from gateway.telemetry.metrics import Metrics
from tests.gateway.conftest import longest_pause, running
from tests.support.fakes import FakeReplica
from tests.support.snapshots import snapshot_of

labels = st.text(max_size=8) | st.sampled_from(['quote"d', "back\\slash", "new\nline", "\\n", ""])
numbers = st.integers(0, 10**17) | st.floats(0, allow_nan=False) | st.sampled_from([1e6, 1e7, 123456789.5, 0.1])


def count(instrument: Instrument, values: tuple[str, ...], number: float) -> None:
    if isinstance(instrument, Counter):
        instrument.add(values, number)
    elif isinstance(instrument, Gauge):
        instrument.set(values, number)
    else:
        instrument.observe(values, number)


@st.composite
def all_metrics(draw: st.DrawFn) -> Metrics:
    """The gateway's metrics, with any label values and any numbers."""
    metrics = Metrics()
    for instrument in draw(st.lists(st.sampled_from(metrics.instruments.all), max_size=20)):
        count(instrument, tuple(draw(labels) for _ in instrument.labels), draw(numbers))
    return metrics


def full(label_sets: int) -> Metrics:
    """Metrics of which each with a client's label has `label_sets` of them."""
    metrics = Metrics()
    for instrument in metrics.instruments.all:
        if "model" in instrument.labels:
            for number in range(label_sets):
                count(instrument, tuple(f"{label}-{number}" for label in instrument.labels), 1.5)
    return metrics


@given(all_metrics())
def test_the_text_is_prometheus_clients_own(metrics: Metrics) -> None:
    assert b"".join(text_slices(metrics.instruments)) == generate_latest(metrics.registry)


def test_labels_are_sorted_by_name_on_both_sides_of_le() -> None:
    metrics = Metrics()
    histogram = metrics.instruments.histogram("x_seconds", "X\\ and\na line.", "z", "model", "a", bounds=(0.5, 1.0))
    histogram.observe(("1", "2", "3"), 0.75)
    text = b"".join(text_slices(metrics.instruments))
    assert text == generate_latest(metrics.registry)
    assert b'x_seconds_bucket{a="3",le="1.0",model="2",z="1"} 1.0' in text


@given(st.lists(all_metrics(), max_size=3))
def test_what_is_packed_and_merged_is_the_snapshot(counted: list[Metrics]) -> None:
    at_once, in_slices = Metrics().instruments, Metrics().instruments
    for metrics in counted:
        at_once.merge(snapshot_of(metrics.instruments))
        for part in unpacked_slices(packed(metrics.instruments)):
            in_slices.merge(part)
    assert snapshot_of(in_slices) == snapshot_of(at_once)


def test_no_slice_is_large() -> None:
    metrics = full(5000)
    slices = [text.count(b"\n") for text in text_slices(metrics.instruments)]
    heads = 2 * len(metrics.instruments.all)
    assert max(slices) <= SLICE + heads + 20, "one histogram's label set more at most"
    assert len(slices) >= sum(slices) / (SLICE + heads + 20)
    parts = [
        sum(len(row) if isinstance(row, list) else 1 for rows in part.values() for row in rows.values())
        for part in metrics.instruments.parts(SLICE)
    ]
    assert max(parts) <= SLICE + 20
    assert min(parts[:-1]) >= SLICE
    assert len(parts) > 50
    assert sum(parts) == sum(
        len(row) if isinstance(row, list) else 1 for instrument in metrics.instruments.all for row in instrument.values.values()
    )


def test_what_an_ordinary_gateway_has_counted_is_one_slice() -> None:
    """Each slice waits for a turn of the event loop, and a slice that is not sent is lost if the process is killed."""
    assert len(list(packed_slices(full(5).instruments))) == 1


async def test_the_event_loop_turns_while_a_large_page_is_rendered_packed_and_merged() -> None:
    page, other = full(5000).instruments, Metrics().instruments
    payload = packed(page)
    for work in (lambda: render(page), lambda: pack(page), lambda: merge(other, payload)):
        begun = time.thread_time()
        longest = await longest_pause(work)
        assert longest < (time.thread_time() - begun) / 2, (
            "the last step of `render` joins all parts: a tenth, and more at times"
        )


async def test_label_sets_may_come_and_go_while_a_page_is_rendered() -> None:
    metrics = full(3000)
    gauge = metrics.replica_up
    for number in range(3000):
        gauge.set((f"r{number}",), 1)
    rendering = asyncio.create_task(render(metrics.instruments))
    number = 0
    while not rendering.done():
        await asyncio.sleep(0)
        number += 1
        metrics.requests.add((f"new-{number}", "other", "200"))
        gauge.values.clear()
        gauge.set((f"new-{number}",), 1)
    assert number > 50
    assert (await rendering).endswith(b"\n")


async def test_scrapes_at_the_same_time_share_one_page() -> None:
    made, go_on = 0, asyncio.Event()

    async def make() -> bytes:
        nonlocal made
        made += 1
        await go_on.wait()
        return b"page %d" % made

    shared = SingleFlight(make)
    asking = [asyncio.create_task(shared.get()) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking[0]
    go_on.set()
    assert await asyncio.gather(*asking[1:]) == [b"page 1"] * 4
    assert await shared.get() == b"page 2", "who asks later gets a new one"


async def test_a_failed_page_is_an_error_for_all_and_the_next_one_is_made_anew() -> None:
    outcomes = [OSError("no"), b"page"]

    async def make() -> bytes:
        await asyncio.sleep(0)
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    shared = SingleFlight(make)
    failed = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [type(each) for each in failed] == [OSError, OSError]
    assert await shared.get() == b"page"


async def test_scrapes_of_a_large_page_do_not_hold_requests() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        for model in range(100):
            for tenant in range(100):
                for kind in ("input", "output"):
                    run.gateway.metrics.cost_usd.add((f"m{model}", f"t{tenant}", kind), 1.0)
                run.gateway.metrics.savings_usd.add((f"m{model}", f"t{tenant}"), 1.0)
        shares = []
        for _ in range(3):
            begun = time.thread_time()
            pause = await longest_pause(lambda: asyncio.gather(*(run.gateway.control.page() for _ in range(20))))
            shares.append(pause / (time.thread_time() - begun))
        assert min(shares) < 0.3, "of the time that they take, each time: it is not the machine"
        status, _, body = await run.get("/metrics")
        assert (status, body.count(b"warmroute_cost_usd_total{")) == (200, 10_002)  # two were folded
