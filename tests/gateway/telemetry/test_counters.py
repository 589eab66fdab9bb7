"""Our counters against prometheus_client's own: the same text, whatever is counted."""

from __future__ import annotations

from typing import Any

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from gateway.telemetry.counters import Counter, FirstValues, Gauge, Histogram, Instruments, merge_max, merge_min, merge_sum
from tests.support.snapshots import snapshot_of

BOUNDS = (0.5, 1.0, 2.5)
labels = st.sampled_from(["a", "b", 'quote"d', "back\\slash", "new\nline"])
counted = st.lists(st.tuples(labels, st.integers(0, 9)))
observed = st.lists(st.tuples(labels, st.sampled_from([0.0, 0.5, 0.53125, 1.0, 2.5, 3.0, 100.0])))


def page_of(instruments: Instruments) -> bytes:
    registry = CollectorRegistry()
    registry.register(instruments)
    return generate_latest(registry)


def made_of(instruments: Instruments) -> tuple[Counter, Gauge, Histogram]:
    counter = instruments.counter("x_things_total", "Things.", "kind")
    gauge = instruments.gauge("x_level", "A level.", "kind")
    return counter, gauge, instruments.histogram("x_seconds", "Seconds.", "kind", bounds=BOUNDS)


def ours(counts: list[tuple[str, int]], seen: list[tuple[str, float]]) -> Instruments:
    instruments = Instruments()
    counter, gauge, histogram = made_of(instruments)
    for kind, amount in counts:
        counter.add((kind,), amount)
        gauge.set((kind,), amount)
    for kind, value in seen:
        histogram.observe((kind,), value)
    return instruments


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


def test_what_has_no_labels_is_there_from_the_beginning() -> None:
    instruments = Instruments()
    instruments.counter("x_total", "X.")
    instruments.histogram("y_seconds", "Y.", bounds=BOUNDS)
    text = page_of(instruments).decode()
    assert "x_total 0.0" in text
    assert 'y_seconds_bucket{le="+Inf"} 0.0' in text


def test_a_counter_can_show_what_is_counted_elsewhere() -> None:
    instruments = Instruments()
    counter = instruments.counter("x_total", "X.", "kind")
    counter.set(("a",), 3)
    counter.set(("a",), 5)
    before = counter.values
    counter.add(("a",), 0.5)
    assert (before, counter.values) == ({("a",): 5.0}, {("a",): 5.5})
    assert b'x_total{kind="a"} 5.5' in page_of(instruments)


def test_a_gauge_without_a_value_has_no_series() -> None:
    instruments = Instruments()
    gauge = instruments.gauge("x", "X.", "kind")
    gauge.set(("a",), 1)
    gauge.set(("a",), None)
    gauge.set(("b",), None)
    assert b"x{" not in page_of(instruments)


story = st.tuples(counted, observed)


@given(st.lists(story, min_size=1, max_size=4))
def test_what_several_processes_count_is_what_one_would_have(stories: list[tuple[list[tuple[str, int]], Any]]) -> None:
    whole = Instruments()
    made_of(whole)
    for counts, seen in stories:
        whole.merge(snapshot_of(ours(counts, seen)))
    every_count = [count for counts, _ in stories for count in counts]
    one = ours(every_count, [observation for _, seen in stories for observation in seen])
    for instrument in one.all:
        if isinstance(instrument, Gauge):
            instrument.values.clear()
    for counts, _ in stories:
        for kind, level in dict(counts).items():  # the last one that each process set
            levels = next(instrument for instrument in one.all if isinstance(instrument, Gauge)).values
            levels[kind,] = max(level, levels.get((kind,), 0))
    assert page_of(whole) == page_of(one)


def test_numbers_of_several_processes_are_merged_by_their_rules() -> None:
    def instruments(value: float) -> Instruments:
        made = Instruments()
        made.gauge("x_sum", "Sum.", merge_rule=merge_sum).set((), value)
        made.gauge("x_most", "Most.", merge_rule=merge_max).set((), value)
        made.gauge("x_least", "Least.", merge_rule=merge_min).set((), value)
        made.counter("x_most_total", "Most.", merge_rule=merge_max).add((), value)
        made.counter("x_total", "Sum.").add((), value)
        return made

    whole = instruments(2.0)
    seen = snapshot_of(instruments(3.0))
    whole.merge(seen)
    assert [instrument.values[()] for instrument in whole.all] == [5.0, 3.0, 2.0, 3.0, 5.0]
    whole.merge(seen, ended=True)
    assert [instrument.values[()] for instrument in whole.all] == [5.0, 3.0, 2.0, 3.0, 8.0], "what has ended has no levels"
    whole.merge({})
    assert snapshot_of(instruments(3.0)) == seen


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.integers(1, 9))), st.integers(0, 6))
def test_beyond_the_bound_label_sets_are_folded_and_no_count_is_lost(counts: list[tuple[str, str, int]], bound: int) -> None:
    instruments = Instruments()
    counter = instruments.counter("x_total", "X.", "model", "kind")
    histogram = instruments.histogram("y_seconds", "Y.", "model", "kind", bounds=BOUNDS)
    instruments.limit_label_sets(bound)
    for model, kind, amount in counts:
        counter.add((model, kind), amount)
        histogram.observe((model, kind), amount)
    for instrument in (counter, histogram):
        assert len(instrument.values) <= bound + 3, "of the folded ones there is one for each kind"
        assert all(model == "other" for model, _ in list(instrument.values)[bound:])
    for kind in "xyz":
        wanted = sum(amount for _, other, amount in counts if other == kind)
        assert sum(value for (_, other), value in counter.values.items() if other == kind) == wanted
        assert sum(row[-1] for (_, other), row in histogram.values.items() if other == kind) == wanted


def test_what_is_taken_in_is_folded_too() -> None:
    instruments, other = Instruments(), Instruments()
    made, remote = [each.counter("x_total", "X.", "tenant") for each in (instruments, other)]
    instruments.limit_label_sets(2)
    for tenant in "abcd":
        remote.add((tenant,), 1)
    for _ in range(2):
        instruments.merge(snapshot_of(other))
    assert made.values == {("a",): 2, ("b",): 2, ("other",): 4}


@given(st.lists(st.text(max_size=2), max_size=30), st.integers(0, 5))
def test_the_first_values_keep_their_names_and_any_further_one_is_other(values: list[str], most: int) -> None:
    first = list(dict.fromkeys(values))[:most]
    bounded = FirstValues(most)
    for value in values:
        assert bounded.label(value) == (value if value in first else "other")
