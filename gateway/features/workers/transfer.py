"""A snapshot over a channel between the hub and a worker: its frames, one in each Part.

It may be much larger than what a channel may hold, so its sender waits while the other end has not taken what was sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.cluster.messages import MessageError
from gateway.features.snapshots.frames import Frames, frames_of
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot
from gateway.features.workers.channel import Channel
from gateway.features.workers.messages import Part

AHEAD_BYTES = 4 << 20  # that may be on their way
PAUSE_S = 0.005


async def send(channel: Channel, number: int, snapshot: Snapshot) -> None:
    """Returns when all was sent, or the other end is gone."""
    for frame in frames_of(snapshot):
        channel.send(Part(number, frame))
        while channel.unsent > AHEAD_BYTES and not channel.closed.is_set():  # noqa: ASYNC110  (a channel has no event for it)
            await asyncio.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True)
class ReceivedSnapshot:
    """A snapshot that has come. number: as in its parts."""

    number: int
    snapshot: Snapshot


class SnapshotReceiver:
    """The receiver's side. The parts of a snapshot come in one piece; one that is begun and not ended is forgotten."""

    def __init__(self) -> None:
        self._number = 0
        self._frames = Frames()

    def receive(self, part: Part) -> ReceivedSnapshot | None:
        """The snapshot, once it is whole. Raises MessageError if it is invalid."""
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
