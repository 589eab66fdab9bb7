"""Snapshots in the store: one gateway puts one there under a key of its own, for a minute; another one takes it.

key: a list of its frames
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Final

from gateway.features.snapshots.frames import Frames, frames_of
from gateway.features.snapshots.snapshot import KnowledgeError, Snapshot

KEEP_S: Final = 60
MAX_BYTES: Final = 64 << 20  # prefixes that were used least recently are left out
AT_ONCE_BYTES: Final = 1 << 20  # in one command
AT_ONCE: Final = 64  # chunks that are read by one command, if they are small


class SnapshotGone(KnowledgeError):
    """It was too long in the store, or somebody else has taken it."""


async def put(client: Any, prefix: str, snapshot: Snapshot) -> str:
    """Returns its key. Raises errors of the client."""
    key = f"{prefix}snapshot:{secrets.token_hex(8)}"
    frames = frames_of(snapshot)
    await _push(client, key, [next(frames)])  # alone: the list has no expiry yet
    pending: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > AT_ONCE_BYTES:
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
    """at: its moment. Raises SnapshotGone, KnowledgeError for an invalid snapshot, and errors of the client."""
    if not key.startswith(f"{prefix}snapshot:"):
        raise KnowledgeError("its key is not that of a snapshot")
    frames, snapshot = Frames(most_bytes=2 * MAX_BYTES), None
    taken, at_once, longest = 0, 1, 1
    while snapshot is None:
        found = await client.lrange(key, taken, taken + at_once - 1)
        for frame in found:
            snapshot = snapshot or frames.add(frame)
        if snapshot is None and len(found) < at_once:
            raise SnapshotGone("it is no longer there") if not taken else KnowledgeError("it is cut off")
        taken += len(found)
        longest = max(longest, *map(len, found))  # the first one is the head: the others may be much longer
        at_once = max(1, min(AT_ONCE, 2 * at_once, AT_ONCE_BYTES // longest))
    return replace(snapshot, at=at, source="another gateway")


async def remove(client: Any, prefix: str, key: str) -> None:
    """Nobody else wants it. Another key than that of a snapshot stays."""
    if key.startswith(f"{prefix}snapshot:"):
        await client.delete(key)
