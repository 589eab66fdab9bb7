"""Counters, gauges and histograms that cost next to nothing to count with; `exposition.py` renders the page of them.

A request counts in a dozen places. prometheus_client finds the child of a label set and takes a lock each time, which
together cost more than routing the request; the gateway counts in one thread, so a dictionary does.

Where several processes are one gateway, each counts for itself, and a page for all of them merges their snapshots. Mostly
the truth is the sum. Where all of them watch the same thing, each in its own time, it is the most (or the least) that one saw.

The number of label sets is bounded for each counter and histogram: a client may name many models and tenants, and the
combinations multiply. Beyond the bound the labels in CHOSEN become "other", which keeps the sum right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Across = Callable[[float, float], float]
"""Two processes' numbers -> the gateway's."""

Snapshot = Mapping[str, Mapping[Labels, Any]]
"""All that a process has counted: by the tallies' names. A number, or a histogram's row, by label set."""

MAX_LABEL_SETS: Final = 10_000  # of one counter or histogram, in one process
CHOSEN: Final = frozenset(["model", "tenant"])  # labels whose values clients and replicas choose
OTHER: Final = "other"


def total(one: float, other: float) -> float:
    return one + other


def most(one: float, other: float) -> float:
    return max(one, other)


def least(one: float, other: float) -> float:
    return min(one, other)


def _folded(names: Labels, values: Labels) -> Labels:
    """A label set with OTHER in the place of what clients and replicas choose."""
    return tuple([OTHER if name in CHOSEN else value for name, value in zip(names, values, strict=True)])


class Cell:
    """One number of a counter. Compiled, it is neither boxed nor put back into a dictionary when it grows."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<Cell {self.value:g}>"


class Counter:
    """A number that grows, for each label set. Without labels it is there from the beginning, as zero.

    max_label_sets: beyond so many label sets a new one is folded.
    """

    __slots__ = ("_cells", "across", "labels", "max_label_sets", "name", "text")

    def __init__(self, name: str, text: str, labels: Labels, across: Across) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.across = across
        self.max_label_sets = MAX_LABEL_SETS
        self._cells: dict[Labels, Cell] = {} if labels else {(): Cell(0.0)}

    @property
    def values(self) -> dict[Labels, float]:
        """The numbers as they are now. A copy. O(label sets)."""
        return {labels: cell.value for labels, cell in self._cells.items()}

    def add(self, labels: Labels = (), amount: float = 1.0) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._new_cell(labels)
        cell.value += amount

    def _new_cell(self, labels: Labels) -> Cell:
        """A cell for a label set that has none; beyond the bound the one of the folded label set."""
        if len(self._cells) >= self.max_label_sets:
            labels = _folded(self.labels, labels)
        return self._cells.setdefault(labels, Cell(0.0))

    def set(self, labels: Labels, value: float) -> None:
        """For a number that is counted elsewhere."""
        self._cells[labels] = Cell(value)

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Forget these label sets."""
        self._cells = {labels: cell for labels, cell in self._cells.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, float]) -> None:
        """What another process has counted."""
        for labels, value in snapshot.items():
            known = labels in self._cells or len(self._cells) < self.max_label_sets
            kept = labels if known else _folded(self.labels, labels)
            cell = self._cells.get(kept)
            self._cells[kept] = Cell(value if cell is None else self.across(cell.value, value))

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Gauge:
    """A number as it is now, for each label set."""

    __slots__ = ("across", "labels", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels, across: Across) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.across = across
        self.values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float | None) -> None:
        """None: there is none; an old one would be taken for true."""
        if value is None:
            self.values.pop(labels, None)
        else:
            self.values[labels] = float(value)  # it may be a bool

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Forget these label sets."""
        self.values = {labels: value for labels, value in self.values.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, float]) -> None:
        """What another process sees now."""
        for labels, value in snapshot.items():
            self.values[labels] = self.across(self.values[labels], value) if labels in self.values else value

    def family(self) -> Metric:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """How many observations fell between which bounds, and their sum, for each label set."""

    __slots__ = ("bound_names", "bounds", "labels", "max_label_sets", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.bounds = tuple(bounds)
        self.values: dict[Labels, list[float]] = {}  # counts between the bounds, above the last one, then the sum
        self.bound_names = [*map(floatToGoString, self.bounds), "+Inf"]
        self.max_label_sets = MAX_LABEL_SETS
        if not labels:
            self._row(())

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels) or self._row(labels)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Forget these label sets."""
        self.values = {labels: row for labels, row in self.values.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, Sequence[float]]) -> None:
        """What another process has observed."""
        for labels, row in snapshot.items():
            mine = self.values.get(labels) or self._row(labels)
            for index, count in enumerate(row):
                mine[index] += count

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, row in self.values.items():
            total, buckets = 0.0, []
            for name, count in zip(self.bound_names, row, strict=False):
                total += count
                buckets.append((name, total))
            family.add_metric(labels, buckets, row[-1])
        return family

    def _row(self, labels: Labels) -> list[float]:
        """A row for a label set that has none; beyond the bound the one of the folded label set."""
        if len(self.values) >= self.max_label_sets:
            labels = _folded(self.labels, labels)
        return self.values.setdefault(labels, [0.0] * (len(self.bounds) + 2))


Tally = Counter | Gauge | Histogram


def _drop(tally: Tally, index: int, names: Container[str], *, dropped: bool) -> None:
    tally.drop(lambda labels: (labels[index] in names) is dropped)


class Page(Collector):
    """All tallies of one process, for a prometheus_client registry."""

    def __init__(self) -> None:
        self.tallies: list[Tally] = []

    def counter(self, name: str, text: str, *labels: str, across: Across = total) -> Counter:
        self.tallies.append(made := Counter(name, text, labels, across))
        return made

    def gauge(self, name: str, text: str, *labels: str, across: Across = most) -> Gauge:
        self.tallies.append(made := Gauge(name, text, labels, across))
        return made

    def histogram(self, name: str, text: str, *labels: str, bounds: Sequence[float]) -> Histogram:
        self.tallies.append(made := Histogram(name, text, labels, bounds))
        return made

    def snapshot(self) -> Snapshot:
        """All of it, for another process. A copy of the tables, not of histograms' rows."""
        return {tally.name: dict(tally.values) for tally in self.tallies}

    def parts(self, size: int) -> Iterator[Snapshot]:
        """All of it, in parts of about `size` samples. A copy of each tally's label sets is made when its turn comes."""
        part: dict[str, dict[Labels, Any]] = {}
        left = size
        for tally in self.tallies:
            samples = len(tally.bounds) + 2 if isinstance(tally, Histogram) else 1
            rows = iter(list(tally.values.items()))
            while some := dict(islice(rows, max(1, left // samples))):
                part.setdefault(tally.name, {}).update(some)
                left -= samples * len(some)
                if left <= 0:
                    yield part
                    part, left = {}, size
        if part:
            yield part

    def hold(self, max_label_sets: int) -> None:
        """Keep so many label sets of each counter and histogram."""
        for tally in self.tallies:
            if not isinstance(tally, Gauge):
                tally.max_label_sets = max_label_sets

    def merge(self, snapshot: Snapshot, *, ended: bool = False) -> None:
        """Add another process's snapshot. ended: that process has ended, so that its gauges mean nothing."""
        for tally in self.tallies:
            if tally.name in snapshot and not (ended and isinstance(tally, Gauge)):
                tally.merge(snapshot[tally.name])

    def drop(self, label: str, values: Container[str]) -> None:
        """Forget all label sets that have one of these values of a label. O(label sets)."""
        for tally in self.tallies:
            if label in tally.labels:
                _drop(tally, tally.labels.index(label), values, dropped=True)

    def keep(self, label: str, values: Container[str]) -> None:
        """Forget all label sets that have another value of a label than these. O(label sets)."""
        for tally in self.tallies:
            if label in tally.labels:
                _drop(tally, tally.labels.index(label), values, dropped=False)

    def values_of(self, label: str) -> set[str]:
        """All values that this label has. O(label sets)."""
        return {values[tally.labels.index(label)] for tally in self.tallies if label in tally.labels for values in tally.values}

    def collect(self) -> Iterator[Metric]:
        return (tally.family() for tally in self.tallies)
