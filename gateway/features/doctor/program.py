"""The main program of an examination's process (`examiner.py`): reads a job and its records, writes the report.

The latest MAX_EXAMINED records of all workers together, at most MAX_EXAMINED_BYTES, are examined in the order of time. Serving
has priority: the process runs at a low priority, and the OOM killer prefers it to a serving process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final

import msgspec

from gateway.config.schema import PriceConfig
from gateway.features.doctor.examination import Examination
from gateway.features.doctor.examiner import RECORD
from gateway.features.doctor.prices import DoctorPrices
from gateway.features.doctor.report import encoded
from gateway.features.doctor.watch import RecordsError, observed

MAX_EXAMINED: Final = 10_000
MAX_EXAMINED_BYTES: Final = 48 << 20
NICE: Final = 10

Timed = tuple[float, bytes]
_Head = tuple[dict[str, Any], dict[str, tuple[PriceConfig, ...]], float]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a draining gateway still answers, and ends this process itself
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    with contextlib.suppress(OSError):  # a system call filter may forbid it
        os.nice(NICE)
    report = examine(sys.stdin.buffer)
    sys.stdout.buffer.write(report)


def examine(stream: BinaryIO) -> bytes:
    """Raises RecordsError."""
    frames = _frames(stream)
    about, prices, now = _head(next(frames, (0.0, b""))[1])
    examination = Examination()
    for record in latest(frames):
        seen = observed(record)
        seen.price = prices.of(seen.model, seen.tokens(seen.units), now)
        examination.add(seen)
    return encoded(about, examination)


def latest(records: Iterable[Timed], max_records: int = MAX_EXAMINED, max_bytes: int = MAX_EXAMINED_BYTES) -> list[bytes]:
    """The latest records, in the order of time. Holds at most twice the bounds, plus one record."""
    pending, size = list[Timed](), 0
    dropped = -math.inf, b""  # the latest dropped record
    for each in records:
        if each <= dropped:
            continue
        pending.append(each)
        size += len(each[1])
        if len(pending) > 2 * max_records or size > 2 * max_bytes:
            pending, size, dropped = _last(pending, max_records, max_bytes, dropped)
    return [record for _, record in _last(pending, max_records, max_bytes, dropped)[0]]


def _last(records: list[Timed], max_records: int, max_bytes: int, dropped: Timed) -> tuple[list[Timed], int, Timed]:
    """(the latest records, sorted; their bytes; the latest dropped record)"""
    records.sort()
    first, size = len(records), 0
    while first and len(records) - first < max_records and size + len(records[first - 1][1]) <= max_bytes:
        first -= 1
        size += len(records[first][1])
    return records[first:], size, records[first - 1] if first else dropped


def _frames(stream: BinaryIO) -> Iterator[Timed]:
    while head := stream.read(RECORD.size):
        if len(head) < RECORD.size:
            raise RecordsError("a record's head is cut off")
        time, length = RECORD.unpack(head)
        record = stream.read(length)
        if len(record) < length:
            raise RecordsError("a record is cut off")
        yield time, record


def _head(data: bytes) -> tuple[Mapping[str, Any], DoctorPrices, float]:
    try:
        about, prices, now = msgspec.msgpack.decode(data, type=_Head)
    except msgspec.MsgspecError as error:
        raise RecordsError(str(error)) from error
    return about, DoctorPrices(prices), now
