"""Counters, gauges and histograms with cheap updates; `exposition.py` renders them for /metrics.

A request updates a dozen of them. prometheus_client looks up the child of a label set and takes a lock each time, which
together cost more than routing the request; the gateway counts in one thread, so a dictionary is enough.

Several workers count separately, and /metrics merges their snapshots, instrument by instrument, with its merge rule: the sum
for values that each worker counts alone, the maximum or minimum for values that all workers observe (a replica's state).

The number of label sets is bounded for each counter and histogram: a client may name many models and tenants, and the
combinations multiply. Beyond the bound the labels in UNBOUNDED_LABELS become "other", which keeps the sum right.
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
MergeRule = Callable[[float, float], float]
"""The values of two workers -> the merged value."""

Snapshot = Mapping[str, Mapping[Labels, Any]]
"""One process's values, by instrument name and label set. A histogram's value is its row."""

MAX_LABEL_SETS: Final = 10_000  # of one counter or histogram, in one process
UNBOUNDED_LABELS: Final = frozenset(["model", "tenant"])  # labels whose values clients and replicas choose
OTHER: Final = "other"


def merge_sum(one: float, other: float) -> float:
    return one + other


def merge_max(one: float, other: float) -> float:
    return max(one, other)


def merge_min(one: float, other: float) -> float:
    return min(one, other)


def _folded(names: Labels, values: Labels) -> Labels:
    """The label set with OTHER for the values of UNBOUNDED_LABELS."""
    return tuple([OTHER if name in UNBOUNDED_LABELS else value for name, value in zip(names, values, strict=True)])


class FirstValues:
    """Bounds a label whose values clients or replicas choose: the first `most` keep theirs, any further one is OTHER."""

    __slots__ = ("_most", "_values")

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: set[str] = set()

    def label(self, value: str) -> str:
        """O(1)."""
        if value in self._values:
            return value
        if len(self._values) >= self._most:
            return OTHER
        self._values.add(value)
        return value

    def __repr__(self) -> str:
        return f"<FirstValues {len(self._values)} of {self._most}>"


class Cell:
    """A counter's value for one label set. Compiled, an increment neither boxes a float nor writes to a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<Cell {self.value:g}>"


class Counter:
    """A monotonic value per label set. Without labels it starts as zero.

    max_label_sets: beyond this number, new label sets are folded.
    """

    __slots__ = ("_cells", "labels", "max_label_sets", "merge_rule", "name", "text")

    def __init__(self, name: str, text: str, labels: Labels, merge_rule: MergeRule) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.merge_rule = merge_rule
        self.max_label_sets = MAX_LABEL_SETS
        self._cells: dict[Labels, Cell] = {} if labels else {(): Cell(0.0)}

    @property
    def values(self) -> dict[Labels, float]:
        """The current values. A copy. O(label sets)."""
        return {labels: cell.value for labels, cell in self._cells.items()}

    def total(self) -> float:
        """The sum of all values, without a copy. O(label sets)."""
        return sum([cell.value for cell in self._cells.values()])

    def by(self, *places: int) -> dict[Labels, float]:
        """Sums by the labels at these places, without a copy. O(label sets)."""
        sums: dict[Labels, float] = {}
        for labels, cell in self._cells.items():
            key = tuple([labels[place] for place in places])
            sums[key] = sums.get(key, 0.0) + cell.value
        return sums

    def add(self, labels: Labels = (), amount: float = 1.0) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._new_cell(labels)
        cell.value += amount

    def _new_cell(self, labels: Labels) -> Cell:
        """The cell of a new label set; beyond the bound, that of the folded label set."""
        if len(self._cells) >= self.max_label_sets:
            labels = _folded(self.labels, labels)
        return self._cells.setdefault(labels, Cell(0.0))

    def set(self, labels: Labels, value: float) -> None:
        """Set the value of another object's count."""
        self._cells[labels] = Cell(value)

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Remove these label sets."""
        self._cells = {labels: cell for labels, cell in self._cells.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, float]) -> None:
        """Add another process's values."""
        for labels, value in snapshot.items():
            known = labels in self._cells or len(self._cells) < self.max_label_sets
            kept = labels if known else _folded(self.labels, labels)
            cell = self._cells.get(kept)
            self._cells[kept] = Cell(value if cell is None else self.merge_rule(cell.value, value))

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name.removesuffix("_total"), self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Gauge:
    """A current value per label set."""

    __slots__ = ("labels", "merge_rule", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels, merge_rule: MergeRule) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.merge_rule = merge_rule
        self.values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float | None) -> None:
        """Set a value; None removes the series, because a stale value would mislead."""
        if value is None:
            self.values.pop(labels, None)
        else:
            self.values[labels] = float(value)  # it may be a bool

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Remove these label sets."""
        self.values = {labels: value for labels, value in self.values.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, float]) -> None:
        """Merge another process's current values."""
        for labels, value in snapshot.items():
            self.values[labels] = self.merge_rule(self.values[labels], value) if labels in self.values else value

    def family(self) -> Metric:
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """Bucket counts and the sum of observations, per label set."""

    __slots__ = ("bound_names", "bounds", "labels", "max_label_sets", "name", "text", "values")

    def __init__(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.bounds = tuple(bounds)
        self.values: dict[Labels, list[float]] = {}  # counts per bucket (the last is +Inf), then the sum
        self.bound_names = [*map(floatToGoString, self.bounds), "+Inf"]
        self.max_label_sets = MAX_LABEL_SETS
        if not labels:
            self._row(())

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels) or self._row(labels)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value

    def drop(self, gone: Callable[[Labels], bool]) -> None:
        """Remove these label sets."""
        self.values = {labels: row for labels, row in self.values.items() if not gone(labels)}

    def merge(self, snapshot: Mapping[Labels, Sequence[float]]) -> None:
        """Add another process's observations."""
        for labels, row in snapshot.items():
            own = self.values.get(labels) or self._row(labels)
            for index, count in enumerate(row):
                own[index] += count

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
        """The row of a new label set; beyond the bound, that of the folded label set."""
        if len(self.values) >= self.max_label_sets:
            labels = _folded(self.labels, labels)
        return self.values.setdefault(labels, [0.0] * (len(self.bounds) + 2))


Instrument = Counter | Gauge | Histogram


def _drop(instrument: Instrument, index: int, names: Container[str], *, dropped: bool) -> None:
    instrument.drop(lambda labels: (labels[index] in names) is dropped)


class Instruments(Collector):
    """All instruments of one process; a collector for a prometheus_client registry."""

    def __init__(self) -> None:
        self.all: list[Instrument] = []

    def counter(self, name: str, text: str, *labels: str, merge_rule: MergeRule = merge_sum) -> Counter:
        self.all.append(made := Counter(name, text, labels, merge_rule))
        return made

    def gauge(self, name: str, text: str, *labels: str, merge_rule: MergeRule = merge_max) -> Gauge:
        self.all.append(made := Gauge(name, text, labels, merge_rule))
        return made

    def histogram(self, name: str, text: str, *labels: str, bounds: Sequence[float]) -> Histogram:
        self.all.append(made := Histogram(name, text, labels, bounds))
        return made

    def parts(self, size: int) -> Iterator[Snapshot]:
        """All values, for another process, in parts of about `size` samples.

        Each instrument's table is copied when it is reached, but not the histograms' rows.
        """
        part: dict[str, dict[Labels, Any]] = {}
        left = size
        for instrument in self.all:
            samples = len(instrument.bounds) + 2 if isinstance(instrument, Histogram) else 1
            rows = iter(list(instrument.values.items()))
            while some := dict(islice(rows, max(1, left // samples))):
                part.setdefault(instrument.name, {}).update(some)
                left -= samples * len(some)
                if left <= 0:
                    yield part
                    part, left = {}, size
        if part:
            yield part

    def limit_label_sets(self, max_label_sets: int) -> None:
        """Bound the label sets of each counter and histogram."""
        for instrument in self.all:
            if not isinstance(instrument, Gauge):
                instrument.max_label_sets = max_label_sets

    def merge(self, snapshot: Snapshot, *, ended: bool = False) -> None:
        """Add another process's snapshot. ended: that process has exited, so its gauges are ignored."""
        for instrument in self.all:
            if instrument.name in snapshot and not (ended and isinstance(instrument, Gauge)):
                instrument.merge(snapshot[instrument.name])

    def drop(self, label: str, values: Container[str]) -> None:
        """Remove all label sets with one of these values of a label. O(label sets)."""
        for instrument in self.all:
            if label in instrument.labels:
                _drop(instrument, instrument.labels.index(label), values, dropped=True)

    def keep(self, label: str, values: Container[str]) -> None:
        """Remove all label sets with another value of a label than these. O(label sets)."""
        for instrument in self.all:
            if label in instrument.labels:
                _drop(instrument, instrument.labels.index(label), values, dropped=False)

    def values_of(self, label: str) -> set[str]:
        """All values of a label. O(label sets)."""
        return {
            values[instrument.labels.index(label)]
            for instrument in self.all
            if label in instrument.labels
            for values in instrument.values
        }

    def collect(self) -> Iterator[Metric]:
        return (instrument.family() for instrument in self.all)
