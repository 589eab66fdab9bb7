"""Transfers a snapshot over a channel between the hub and a worker: one frame in each SnapshotPart.

A snapshot may be much larger than the buffer of a channel, so the sender waits while the other end has not read the earlier
parts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.cluster.messages import MessageError
from gateway.features.snapshots.frames import Frames, frames_of
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import SnapshotPart

MAX_UNREAD_BYTES = 4 << 20  # sent and not read yet, at most
PAUSE_S = 0.005


async def send(channel: Channel, number: int, snapshot: Snapshot) -> None:
    """Sends a snapshot. Returns when all is sent, or the other end has closed."""
    for frame in frames_of(snapshot):
        channel.send(SnapshotPart(number, frame))
        while channel.unsent > MAX_UNREAD_BYTES and not channel.closed.is_set():  # noqa: ASYNC110  (a channel has no event for this)
            await asyncio.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True)
class ReceivedSnapshot:
    """A received snapshot. number: as in its parts."""

    number: int
    snapshot: Snapshot


class SnapshotReceiver:
    """Assembles a snapshot. The parts of a snapshot are consecutive; an incomplete one is dropped when another begins."""

    def __init__(self) -> None:
        self._number = 0
        self._frames = Frames()

    def receive(self, part: SnapshotPart) -> ReceivedSnapshot | None:
        """The snapshot, when it is complete. Raises MessageError if it is invalid."""
        if part.number != self._number:
            self._number, self._frames = part.number, Frames()
        try:
            snapshot = self._frames.add(part.frame)
        except KnowledgeError as error:
            raise MessageError(str(error)) from error
        if snapshot is None:
            return None
        self._number = 0
        return ReceivedSnapshot(part.number, snapshot)
