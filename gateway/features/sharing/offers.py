"""Snapshots in the store: a gateway writes one under a new key for a minute, and another gateway reads it.

key: a list of frames
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Final

from gateway.features.snapshots.frames import Frames, frames_of
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot

KEEP_S: Final = 60
MAX_BYTES: Final = 64 << 20  # the least recently used prefixes are left out
MAX_COMMAND_BYTES: Final = 1 << 20  # per command
MAX_FRAMES_PER_READ: Final = 64  # frames per read, if they are small


class SnapshotMissing(KnowledgeError):
    """The snapshot has expired in the store, or another gateway has removed it."""


async def put(client: Any, prefix: str, snapshot: Snapshot) -> str:
    """Writes a snapshot and returns its key. Raises the client's errors."""
    key = f"{prefix}snapshot:{secrets.token_hex(8)}"
    frames = frames_of(snapshot)
    await _push(client, key, [next(frames)])  # alone: the list has no expiry yet
    pending: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > MAX_COMMAND_BYTES:
            await _push(client, key, pending)
            pending, size = [], 0
        pending.append(frame)
        size += len(frame)
    await _push(client, key, pending)
    return key


async def _push(client: Any, key: str, values: list[bytes]) -> None:
    if values:
        await client.rpush(key, *values)
        await client.expire(key, KEEP_S)


async def get(client: Any, prefix: str, key: str, at: float) -> Snapshot:
    """Reads a snapshot. at: its time. Raises SnapshotMissing, KnowledgeError for an invalid snapshot, and the client's
    errors.
    """
    if not key.startswith(f"{prefix}snapshot:"):
        raise KnowledgeError("its key is not the key of a snapshot")
    frames, snapshot = Frames(max_bytes=2 * MAX_BYTES), None
    taken, at_once, longest = 0, 1, 1
    while snapshot is None:
        found = await client.lrange(key, taken, taken + at_once - 1)
        for frame in found:
            snapshot = snapshot or frames.add(frame)
        if snapshot is None and len(found) < at_once:
            raise SnapshotMissing("it is no longer there") if not taken else KnowledgeError("it is cut off")
        taken += len(found)
        longest = max(longest, *map(len, found))  # the first frame is the short head; the others may be much longer
        at_once = max(1, min(MAX_FRAMES_PER_READ, 2 * at_once, MAX_COMMAND_BYTES // longest))
    return replace(snapshot, at=at, source="another gateway")


async def remove(client: Any, prefix: str, key: str) -> None:
    """Deletes a snapshot. Ignores keys of other data."""
    if key.startswith(f"{prefix}snapshot:"):
        await client.delete(key)
