"""Our counters against prometheus_client's own: the same page, whatever is counted."""

from __future__ import annotations

from typing import Any

import orjson
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.tallies import Page

BOUNDS = (0.5, 1.0, 2.5)
labels = st.sampled_from(["a", "b", 'quote"d', "back\\slash", "new\nline"])
counted = st.lists(st.tuples(labels, st.integers(0, 9)))
observed = st.lists(st.tuples(labels, st.sampled_from([0.0, 0.5, 0.51, 1.0, 2.5, 3.0, 100.0])))


def page_of(page: Page) -> bytes:
    registry = CollectorRegistry()
    registry.register(page)
    return generate_latest(registry)


def ours(counts: list[tuple[str, int]], seen: list[tuple[str, float]]) -> Page:
    page = Page()
    counter = page.counter("x_things_total", "Things.", "kind")
    gauge = page.gauge("x_level", "A level.", "kind")
    histogram = page.histogram("x_seconds", "Seconds.", "kind", bounds=BOUNDS)
    for kind, amount in counts:
        counter.add((kind,), amount)
        gauge.set((kind,), amount)
    for kind, value in seen:
        histogram.observe((kind,), value)
    return page


@given(counted, observed)
def test_the_page_is_prometheus_clients_own(counts: list[tuple[str, int]], seen: list[tuple[str, float]]) -> None:
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    counter = prometheus_client.Counter("x_things_total", "Things.", ["kind"], registry=registry)
    gauge = prometheus_client.Gauge("x_level", "A level.", ["kind"], registry=registry)
    histogram = prometheus_client.Histogram("x_seconds", "Seconds.", ["kind"], buckets=BOUNDS, registry=registry)
    for kind, amount in counts:
        counter.labels(kind).inc(amount)
        gauge.labels(kind).set(amount)
    for kind, value in seen:
        histogram.labels(kind).observe(value)
    assert page_of(ours(counts, seen)) == generate_latest(registry)


@given(counted, observed, counted, observed)
def test_merging_is_counting_together(
    counts: list[tuple[str, int]], seen: list[tuple[str, float]], more: list[tuple[str, int]], later: list[tuple[str, float]]
) -> None:
    """Through JSON, as it goes from one process to another."""
    one, two, both = ours(counts, seen), ours(more, later), ours(counts + more, seen + later)
    for mine, others, expected in zip(one.tallies, two.tallies, both.tallies, strict=True):
        if hasattr(mine, "merge"):
            dumped: Any = orjson.loads(orjson.dumps(others.dump()))  # type: ignore[union-attr]
            mine.merge(dumped)
            got, wanted = mine.values, expected.values
            assert got.keys() == wanted.keys()
            assert all(got[key] == pytest.approx(wanted[key]) for key in got)  # type: ignore[index]


def test_what_has_no_labels_is_there_from_the_beginning() -> None:
    page = Page()
    page.counter("x_total", "X.")
    page.histogram("y_seconds", "Y.", bounds=BOUNDS)
    text = page_of(page).decode()
    assert "x_total 0.0" in text
    assert 'y_seconds_bucket{le="+Inf"} 0.0' in text


def test_a_gauge_without_a_value_has_no_series() -> None:
    page = Page()
    gauge = page.gauge("x", "X.", "kind")
    gauge.set(("a",), 1)
    gauge.set(("a",), None)
    gauge.set(("b",), None)
    assert b"x{" not in page_of(page)
