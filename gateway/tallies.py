"""Counters, gauges and histograms that cost next to nothing to count with; prometheus_client writes the page of them.

A request counts in a dozen places. prometheus_client finds the child of a label set and takes a lock each time, which
together cost more than routing the request; the gateway counts in one thread, so a dictionary does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counter:
    """A number that grows, for each label set. Without labels it is there from the beginning, as zero."""

    __slots__ = ("labels", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, labels: Labels = (), amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Gauge:
    """A number as it is now, for each label set."""

    __slots__ = ("labels", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float | None) -> None:
        """None: there is none; an old one would be taken for true."""
        if value is None:
            self.values.pop(labels, None)
        else:
            self.values[labels] = value

    def family(self) -> Metric:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """How many observations fell between which bounds, and their sum, for each label set."""

    __slots__ = ("_names", "bounds", "labels", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.bounds = tuple(bounds)
        self.values: dict[Labels, list[float]] = {}  # counts between the bounds, above the last one, then the sum
        self._names = [*map(floatToGoString, self.bounds), "+Inf"]
        if not labels:
            self._row(())

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels) or self._row(labels)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, row in self.values.items():
            total, buckets = 0.0, []
            for name, count in zip(self._names, row, strict=False):
                total += count
                buckets.append((name, total))
            family.add_metric(labels, buckets, row[-1])
        return family

    def _row(self, labels: Labels) -> list[float]:
        row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        return row


Tally = Counter | Gauge | Histogram


class Page(Collector):
    """All tallies of one process, for a prometheus_client registry."""

    def __init__(self) -> None:
        self.tallies: list[Tally] = []

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        self.tallies.append(made := Counter(name, text, labels))
        return made

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        self.tallies.append(made := Gauge(name, text, labels))
        return made

    def histogram(self, name: str, text: str, *labels: str, bounds: Sequence[float]) -> Histogram:
        self.tallies.append(made := Histogram(name, text, labels, bounds))
        return made

    def collect(self) -> Iterator[Metric]:
        return (tally.family() for tally in self.tallies)
