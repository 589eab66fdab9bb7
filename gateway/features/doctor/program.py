"""The main program of an examination's process (`examiner.py`): reads a job and its records, writes the report.

The last MAX_EXAMINED records of all workers together, MAX_EXAMINED_BYTES at most, are examined in the order of time. Requests
go first: the process is nice, and the OOM killer takes it before one that serves.
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
        signal.signal(number, signal.SIG_IGN)  # a draining gateway still answers; it ends this process itself
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    with contextlib.suppress(OSError):  # a filter of system calls may deny it
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


def latest(records: Iterable[Timed], most: int = MAX_EXAMINED, most_bytes: int = MAX_EXAMINED_BYTES) -> list[bytes]:
    """The last ones, in the order of time. Never holds more than twice the bounds, and one record."""
    kept, size = list[Timed](), 0
    dropped = -math.inf, b""  # the last one of them
    for each in records:
        if each <= dropped:
            continue
        kept.append(each)
        size += len(each[1])
        if len(kept) > 2 * most or size > 2 * most_bytes:
            kept, size, dropped = _last(kept, most, most_bytes, dropped)
    return [record for _, record in _last(kept, most, most_bytes, dropped)[0]]


def _last(records: list[Timed], most: int, most_bytes: int, dropped: Timed) -> tuple[list[Timed], int, Timed]:
    """(the last ones, in order; their bytes; the last that is dropped)"""
    records.sort()
    first, size = len(records), 0
    while first and len(records) - first < most and size + len(records[first - 1][1]) <= most_bytes:
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
