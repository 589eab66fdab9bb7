"""A snapshot over a channel between the hub and a worker: Known, its Parts, Whole.

It may be much larger than what a channel may hold, so its sender waits while the other end has not taken what was sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.cluster.messages import MessageError
from gateway.cluster.snapshots.knowledge import MAX_BYTES
from gateway.cluster.snapshots.snapshot import Header, Snapshot, decode_header, encode_header
from gateway.cluster.workers.channel import Channel
from gateway.cluster.workers.messages import Known, Part, Sent, Whole

AHEAD_BYTES = 4 << 20  # that may be on their way
PAUSE_S = 0.005


async def send(channel: Channel, snapshot: Snapshot) -> None:
    """Returns when all was sent, or the other end is gone."""
    channel.send(Known(encode_header(snapshot.header), snapshot.at, snapshot.source))
    for chunk in snapshot.chunks:
        while channel.unsent > AHEAD_BYTES and not channel.closed.is_set():  # noqa: ASYNC110  (a channel has no event for it)
            await asyncio.sleep(PAUSE_S)
        channel.send(Part(chunk))
    channel.send(Whole())


@dataclass(slots=True)
class _Begun:
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

    def receive(self, message: Sent) -> Snapshot | None:
        """The snapshot, once it is whole. Raises MessageError for what is no snapshot."""
        match message:
            case Known(header, at, source):
                self._begun = _Begun(decode_header(header), at, source, [])
            case Part(chunk) if self._begun:
                self._begun.size += len(chunk)
                if self._begun.size > self._most_bytes:
                    raise MessageError("a snapshot is too large")
                self._begun.chunks.append(chunk)
            case Whole() if self._begun:
                begun, self._begun = self._begun, None
                return Snapshot(begun.header, begun.chunks, begun.at, begun.source)
        return None
