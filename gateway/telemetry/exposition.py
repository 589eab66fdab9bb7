"""/metrics in Prometheus' text format, rendered, sent and merged in slices.

There can be 100,000 samples, because labels multiply (models x tenants x kinds). prometheus_client renders them in one call,
which blocks the event loop for a second. Here each step handles about SLICE samples, and between two steps the loop serves
requests. The text is the same as prometheus_client's, byte for byte; a test compares them.

    one process:      instruments ──text──► /metrics
    several workers:  instruments ──packed──► other worker ──unpacked──► merged instruments ──text──► /metrics

A label set is rendered in one step, so that a histogram's buckets agree with its sum. Different label sets may be some
milliseconds apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec
from prometheus_client import utils

from gateway.telemetry.counters import Counter, Gauge, Histogram, Instrument, Instruments, Labels, Snapshot

SLICE: Final = 1000  # samples; some milliseconds at most

T = TypeVar("T")

# Packed instruments are a list of parts, each encoded separately, so that one can be decoded at a time.
_ENCODER: Final = msgspec.msgpack.Encoder()
_PARTS: Final = msgspec.msgpack.Decoder(list[bytes])
_PART: Final = msgspec.msgpack.Decoder(dict[str, dict[tuple[str, ...], float | list[float]]])

_number: Callable[[float], str] = utils.floatToGoString


class SnapshotError(ValueError):
    """These bytes are not packed instruments of a process of this gateway."""


async def in_slices(steps: Iterable[T]) -> list[T]:
    """The results of all steps; the event loop runs between two of them."""
    results: list[T] = []
    for result in steps:
        results.append(result)
        await asyncio.sleep(0)
    return results


async def render(instruments: Instruments) -> bytes:
    """The instruments as text."""
    return b"".join(await in_slices(text_slices(instruments)))


async def pack(instruments: Instruments) -> bytes:
    """All values of this process, for `merge` in another one."""
    return _ENCODER.encode(await in_slices(packed_slices(instruments)))


def packed(instruments: Instruments) -> bytes:
    """`pack` in one step."""
    return _ENCODER.encode(list(packed_slices(instruments)))


async def merge(instruments: Instruments, payload: bytes, *, ended: bool = False) -> None:
    """Add another process's packed values. ended: that process has exited, so its gauges are ignored.

    Raises SnapshotError; a part of it may have been added by then.
    """
    for _ in merge_slices(instruments, payload, ended=ended):
        await asyncio.sleep(0)


def merge_slices(instruments: Instruments, payload: bytes, *, ended: bool = False) -> Iterator[None]:
    """`merge`, one part per step."""
    for part in unpacked_slices(payload):
        try:
            instruments.merge(part, ended=ended)
        except (TypeError, LookupError) as error:
            raise SnapshotError(f"counters that do not match the instruments here: {error}") from error
        yield


def packed_slices(instruments: Instruments) -> Iterator[bytes]:
    for part in instruments.parts(SLICE):  # not a generator expression: mypyc evaluates it at once
        yield _ENCODER.encode(part)


def unpacked_slices(payload: bytes) -> Iterator[Snapshot]:
    """Parts of packed instruments. Raises SnapshotError."""
    try:
        for part in _PARTS.decode(payload):
            yield _PART.decode(part)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SnapshotError(f"not packed counters: {error}") from error


def text_slices(instruments: Instruments) -> Iterator[bytes]:
    """`render` in pieces of about SLICE samples."""
    lines: list[str] = []
    for instrument in instruments.all:
        lines.append(_head(instrument))
        samples = 0
        for text, count in _rows(instrument):
            lines.append(text)
            samples += count
            if samples >= SLICE:
                yield "".join(lines).encode()
                lines, samples = [], 0
    yield "".join(lines).encode()


def _head(instrument: Instrument) -> str:
    kind = "counter" if isinstance(instrument, Counter) else "gauge" if isinstance(instrument, Gauge) else "histogram"
    text = instrument.text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {instrument.name} {text}\n# TYPE {instrument.name} {kind}\n"


def _rows(instrument: Instrument) -> Iterator[tuple[str, int]]:
    """(lines, number of samples) per label set."""
    if isinstance(instrument, Histogram):
        yield from _histogram_rows(instrument)
        return
    name, label_text = instrument.name, _label_writer(instrument.labels)
    values = list(instrument.values.items())  # label sets may come and go between two slices
    for labels, value in values:
        yield f"{name}{_braced(label_text(labels))} {_number(value)}\n", 1


def _histogram_rows(instrument: Histogram) -> Iterator[tuple[str, int]]:
    label_text, name = _label_writer(instrument.labels), instrument.name
    first = sum(label < "le" for label in instrument.labels)  # labels are written sorted by name
    before, after = _label_writer(instrument.labels, 0, first), _label_writer(instrument.labels, first, None)
    for labels, row in list(instrument.values.items()):
        left, right = before(labels), after(labels)
        left, right = left and left + ",", right and "," + right
        total, lines = 0.0, []
        for bound, count in zip(instrument.bound_names, row, strict=False):
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


class SingleFlight:
    """One run of an expensive `make`, shared by all concurrent callers. A cancelled caller does not cancel it."""

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
