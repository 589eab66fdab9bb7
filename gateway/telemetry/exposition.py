"""The metrics page in Prometheus' text format, rendered, sent and merged in slices.

A page can have 100,000 samples, because labels multiply (models x tenants x kinds). prometheus_client renders it in one call,
which holds the event loop for a second. Here each step handles about SLICE samples, and between two steps the loop serves
requests. The text is the same as prometheus_client's, byte by byte; a test compares them.

    one process:      counters ──text──► page
    several workers:  counters ──packed──► other worker ──unpacked──► merged counters ──text──► page

A label set is rendered in one step, so that a histogram's buckets fit its sum. Different label sets may be some milliseconds
apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec
from prometheus_client import utils

from gateway.telemetry.counters import Counter, Gauge, Histogram, Labels, Page, Snapshot, Tally

SLICE: Final = 1000  # samples; some milliseconds at most

T = TypeVar("T")

# A packed page is a list of parts, each encoded by itself, so that one can be decoded at a time.
_ENCODER: Final = msgspec.msgpack.Encoder()
_PARTS: Final = msgspec.msgpack.Decoder(list[bytes])
_PART: Final = msgspec.msgpack.Decoder(dict[str, dict[tuple[str, ...], float | list[float]]])

_number: Callable[[float], str] = utils.floatToGoString


class SnapshotError(ValueError):
    """These bytes are no counters of a process of this gateway."""


async def in_slices(steps: Iterable[T]) -> list[T]:
    """The results of all steps; the event loop runs between two of them."""
    results: list[T] = []
    for result in steps:
        results.append(result)
        await asyncio.sleep(0)
    return results


async def render(page: Page) -> bytes:
    """The page as text."""
    return b"".join(await in_slices(text_slices(page)))


async def pack(page: Page) -> bytes:
    """All counters of this process, for `merge` in another one."""
    return _ENCODER.encode(await in_slices(packed_slices(page)))


def packed(page: Page) -> bytes:
    """`pack` in one step."""
    return _ENCODER.encode(list(packed_slices(page)))


async def merge(page: Page, payload: bytes, *, ended: bool = False) -> None:
    """Add what another process has packed. ended: that process has ended, so that its gauges mean nothing.

    Raises SnapshotError; a part of it may have been added by then.
    """
    for _ in merge_slices(page, payload, ended=ended):
        await asyncio.sleep(0)


def merge_slices(page: Page, payload: bytes, *, ended: bool = False) -> Iterator[None]:
    """`merge`, a part at each step."""
    for part in unpacked_slices(payload):
        try:
            page.merge(part, ended=ended)
        except (TypeError, LookupError) as error:
            raise SnapshotError(f"counters of another kind than here: {error}") from error
        yield


def packed_slices(page: Page) -> Iterator[bytes]:
    for part in page.parts(SLICE):  # mypyc would make all at once of a generator expression
        yield _ENCODER.encode(part)


def unpacked_slices(payload: bytes) -> Iterator[Snapshot]:
    """Parts of a packed page. Raises SnapshotError."""
    try:
        for part in _PARTS.decode(payload):
            yield _PART.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"no packed counters: {error}") from error


def text_slices(page: Page) -> Iterator[bytes]:
    """The page's text, in pieces of about SLICE samples."""
    lines: list[str] = []
    for tally in page.tallies:
        lines.append(_head(tally))
        samples = 0
        for text, count in _rows(tally):
            lines.append(text)
            samples += count
            if samples >= SLICE:
                yield "".join(lines).encode()
                lines, samples = [], 0
    yield "".join(lines).encode()


def _head(tally: Tally) -> str:
    kind = "counter" if isinstance(tally, Counter) else "gauge" if isinstance(tally, Gauge) else "histogram"
    text = tally.text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {tally.name} {text}\n# TYPE {tally.name} {kind}\n"


def _rows(tally: Tally) -> Iterator[tuple[str, int]]:
    """(lines, number of samples) of each label set."""
    if isinstance(tally, Histogram):
        yield from _histogram_rows(tally)
        return
    name, label_text = tally.name, _label_writer(tally.labels)
    values = list(tally.values.items())  # while the page is rendered, label sets come and go
    for labels, value in values:
        yield f"{name}{_braced(label_text(labels))} {_number(value)}\n", 1


def _histogram_rows(tally: Histogram) -> Iterator[tuple[str, int]]:
    label_text, name = _label_writer(tally.labels), tally.name
    first = sum(label < "le" for label in tally.labels)  # labels are sorted by name
    before, after = _label_writer(tally.labels, 0, first), _label_writer(tally.labels, first, None)
    for labels, row in list(tally.values.items()):
        left, right = before(labels), after(labels)
        left, right = left and left + ",", right and "," + right
        total, lines = 0.0, []
        for bound, count in zip(tally.bound_names, row, strict=False):
            total += count
            lines.append(f'{name}_bucket{{{left}le="{bound}"{right}}} {_number(total)}\n')
        braced = _braced(label_text(labels))
        lines.append(f"{name}_count{braced} {_number(total)}\n{name}_sum{braced} {_number(row[-1])}\n")
        yield "".join(lines), len(row) + 1


def _braced(text: str) -> str:
    return f"{{{text}}}" if text else ""


def _label_writer(names: Labels, begin: int = 0, end: int | None = None) -> Callable[[Labels], str]:
    """Writes label values as `name="value",...`, sorted by name. begin, end: only these of the sorted labels."""
    order = sorted(range(len(names)), key=lambda index: names[index])[begin:end]
    chosen = [(index, names[index]) for index in order]

    def write(values: Labels) -> str:
        return ",".join([f'{name}="{_escaped(values[index])}"' for index, name in chosen])

    return write


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class Shared:
    """One run of an expensive `make` for all callers that ask while it runs. A caller that is cancelled does not end it."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._running: asyncio.Future[bytes] | None = None

    async def get(self) -> bytes:
        if self._running is None:
            self._running = asyncio.ensure_future(self._make())
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)

    def _done(self, _made: asyncio.Future[bytes]) -> None:
        self._running = None
