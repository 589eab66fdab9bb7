"""Snapshots in the store: a gateway puts one under a key of its own, for a minute; another gateway takes it.

key: a list: the header, then the chunks
"""

from __future__ import annotations

import secrets
from typing import Any, Final

from gateway.cluster.messages import MessageError
from gateway.features.snapshots.snapshot import (
    MAX_CHUNK_BYTES,
    KnowledgeError,
    Snapshot,
    decode_header,
    encode_header,
)

KEEP_S: Final = 60
MAX_BYTES: Final = 64 << 20  # the least recently used prefixes are left out
AT_ONCE_BYTES: Final = 1 << 20  # in one command
AT_ONCE: Final = 64  # small chunks that one command reads


class SnapshotGoneError(KnowledgeError):
    """The snapshot has expired, or another gateway has taken it."""


async def put(client: Any, prefix: str, snapshot: Snapshot) -> str:
    """Put a snapshot, and return its key. Raises the client's errors."""
    key = f"{prefix}snapshot:{secrets.token_hex(8)}"
    await _push(client, key, [encode_header(snapshot.header)])  # alone: it has no expiry yet if the connection is lost now
    pending: list[bytes] = []
    size = 0
    for chunk in snapshot.chunks:
        if size + len(chunk) > AT_ONCE_BYTES:
            await _push(client, key, pending)
            pending, size = [], 0
        pending.append(chunk)
        size += len(chunk)
    await _push(client, key, pending)
    return key


async def _push(client: Any, key: str, values: list[bytes]) -> None:
    if values:
        await client.rpush(key, *values)
        await client.expire(key, KEEP_S)


async def get(client: Any, prefix: str, key: str, at: float) -> Snapshot:
    """Read a snapshot. at: its time. Raises SnapshotGoneError, KnowledgeError if it is not valid, and the client's errors."""
    if not key.startswith(f"{prefix}snapshot:"):
        raise KnowledgeError("its key is not that of a snapshot")
    values: list[bytes] = []
    size, at_once, longest = 0, 1, 1
    while True:
        found = await client.lrange(key, len(values), len(values) + at_once - 1)
        size += sum(map(len, found))
        if size > 2 * MAX_BYTES or any(len(each) > MAX_CHUNK_BYTES for each in found):
            raise KnowledgeError("it is too large")
        values += found
        if len(found) < at_once:
            break
        longest = max(longest, *map(len, found))  # the first one is the header: the others may be much longer
        at_once = max(1, min(AT_ONCE, 2 * at_once, AT_ONCE_BYTES // longest))
    if not values:
        raise SnapshotGoneError("it is no longer there")
    try:
        return Snapshot(decode_header(values[0]), values[1:], at, "another gateway")
    except MessageError as error:
        raise KnowledgeError(str(error)) from error


async def remove(client: Any, prefix: str, key: str) -> None:
    """Delete a snapshot. Other keys are not deleted."""
    if key.startswith(f"{prefix}snapshot:"):
        await client.delete(key)
