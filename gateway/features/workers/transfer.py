"""A snapshot over a channel between the hub and a worker: SnapshotBegin, its SnapshotChunks, SnapshotEnd.

It may be much larger than what a channel may hold, so its sender waits while the other end has not taken what was sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.cluster.messages import MessageError
from gateway.features.snapshots.knowledge import MAX_BYTES
from gateway.features.snapshots.snapshot import Header, Snapshot, decode_header, encode_header
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import SnapshotBegin, SnapshotChunk, SnapshotEnd, SnapshotPart

AHEAD_BYTES = 4 << 20  # that may be on their way
PAUSE_S = 0.005


async def send(channel: Channel, number: int, snapshot: Snapshot) -> None:
    """Returns when all was sent, or the other end is gone."""
    channel.send(SnapshotBegin(number, encode_header(snapshot.header), snapshot.at, snapshot.source))
    for chunk in snapshot.chunks:
        while channel.unsent > AHEAD_BYTES and not channel.closed.is_set():  # noqa: ASYNC110  (a channel has no event for it)
            await asyncio.sleep(PAUSE_S)
        channel.send(SnapshotChunk(number, chunk))
    channel.send(SnapshotEnd(number))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A snapshot that has come. number: as in its messages."""

    number: int
    snapshot: Snapshot


@dataclass(slots=True)
class _Begun:
    number: int
    header: Header
    at: float
    source: str
    chunks: list[bytes]
    size: int = 0


class Arrival:
    """The receiver's side."""

    def __init__(self, most_bytes: int = 2 * MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._begun: _Begun | None = None

    def receive(self, message: SnapshotPart) -> Arrived | None:
        """The snapshot, once it is whole. Raises MessageError for what is no snapshot."""
        if isinstance(message, SnapshotBegin):
            self._begun = _Begun(message.number, decode_header(message.header), message.at, message.source, [])
            return None
        begun = self._begun
        if begun is None:
            return None
        if isinstance(message, SnapshotEnd):
            self._begun = None
            return Arrived(begun.number, Snapshot(begun.header, begun.chunks, begun.at, begun.source))
        begun.size += len(message.chunk)
        if begun.size > self._most_bytes:
            raise MessageError("a snapshot is too large")
        begun.chunks.append(message.chunk)
        return None
