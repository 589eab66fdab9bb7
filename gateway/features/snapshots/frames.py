"""Frames of a snapshot, the same for all carriers: the file, the channel of a worker, the store of other gateways.

    head         the time of the snapshot, its source, its header
    chunk ...    encoded records
    end          END, and the xxh3-128 digest of all frames before it

A chunk is a msgpack array, which never begins with END. The age of a snapshot is measured by the machine's monotonic clock if
it was made since the last boot. Otherwise the wall clock is used, which may have been set: a negative age counts as zero.

Structs lose their types in modules compiled by mypyc, so this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta, Struct

from gateway.cluster.messages import MessageError, decode
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import MAX_CHUNK_BYTES, Header, KnowledgeError, Snapshot

END: Final = b"\xc1"


@dataclass(frozen=True, slots=True)
class Clocks:
    """boot: an id of the machine's boot, "" if unknown. monotonic: seconds since that boot. wall: Unix time in seconds."""

    boot: Callable[[], str]
    monotonic: Callable[[], float]
    wall: Callable[[], float]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


CLOCKS: Final = Clocks(_boot_id, lambda: time.clock_gettime(time.CLOCK_MONOTONIC), time.time)


class _Head(Struct, frozen=True, array_like=True):
    """boot, monotonic, wall: the time of the snapshot, by both clocks. source: as in Snapshot."""

    boot: Annotated[str, Meta(max_length=256)]
    monotonic: float
    wall: float
    source: Annotated[str, Meta(max_length=4096)]
    header: Header


_HEAD: Final = msgspec.msgpack.Decoder(_Head)


def frames_of(snapshot: Snapshot, clocks: Clocks = CLOCKS) -> Iterator[bytes]:
    digest, age_s = xxhash.xxh3_128(), clocks.monotonic() - snapshot.at
    head = _Head(clocks.boot(), snapshot.at, clocks.wall() - age_s, snapshot.source[:4096], snapshot.header)
    frame = msgspec.msgpack.encode(head)
    digest.update(frame)
    yield frame
    for chunk in snapshot.chunks:
        digest.update(chunk)
        yield chunk
    yield END + digest.digest()


class Frames:
    """Assembles a snapshot frame by frame."""

    def __init__(self, clocks: Clocks = CLOCKS, max_bytes: int = 2 * MAX_BYTES) -> None:
        self._clocks = clocks
        self._remaining_bytes = max_bytes
        self._head: _Head | None = None
        self._chunks: list[bytes] = []
        self._digest = xxhash.xxh3_128()

    def add(self, frame: bytes) -> Snapshot | None:
        """Returns the snapshot after its last frame. Raises KnowledgeError if it is invalid."""
        self._remaining_bytes -= len(frame)
        if self._remaining_bytes < 0 or len(frame) > MAX_CHUNK_BYTES:
            raise KnowledgeError("it is too large")
        if self._head is None:
            try:
                self._head = decode(_HEAD, frame)
            except MessageError as error:
                raise KnowledgeError(f"its header is not of this version ({error})") from error
        elif frame.startswith(END):
            if frame != END + self._digest.digest():
                raise KnowledgeError("its checksum is wrong: it was changed, or is incomplete")
            return Snapshot(self._head.header, self._chunks, self._at(self._head), self._head.source)
        else:
            self._chunks.append(frame)
        self._digest.update(frame)
        return None

    def _at(self, head: _Head) -> float:
        """The time of the snapshot, by this machine's monotonic clock."""
        now = self._clocks.monotonic()
        if head.boot and head.boot == self._clocks.boot():
            return min(now, head.monotonic)
        return now - max(0.0, self._clocks.wall() - head.wall)
