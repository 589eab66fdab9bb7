"""What a router writes all readers take, however long its prompts are: a file, another gateway, a worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gateway.features.sharing import offers
from gateway.features.snapshots.file import read, write
from gateway.features.snapshots.frames import frames_of
from gateway.features.snapshots.snapshot import MAX_CHUNK_BYTES, Header, Snapshot
from gateway.features.workers.channel import MAX_MESSAGE_BYTES
from gateway.features.workers.messages import SnapshotPart, encode, from_hub
from gateway.features.workers.transfer import ReceivedSnapshot, SnapshotReceiver
from router import Replica, Router
from router.snapshot import records
from router.snapshot.collect import SLICE, SLICE_BYTES, collect
from router.snapshot.records import MAX_PATH_BLOCKS, MAX_TEXT
from router.types import KEY_BYTES

HEADER = Header("1/256", {})


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    """Of prompts as long as there can be, which together are longer than any chunk that is read."""
    router, chance = Router(policy="cost", ttl_s=900, memory_bytes=1 << 30, chance=random.Random(1)), random.Random(1)
    router.add(Replica("a"))
    length = MAX_PATH_BLOCKS * KEY_BYTES
    for number in range(MAX_CHUNK_BYTES // length + 1):
        router.trie.insert("a", chance.randbytes(length), float(number))
    chunks = [records.encode(slice_) for slice_ in collect(router, 100.0) if slice_]
    assert sum(map(len, chunks)) > MAX_CHUNK_BYTES
    return Snapshot(HEADER, chunks, 100.0)


def test_a_chunk_is_shorter_than_what_readers_take() -> None:
    """One record of the greatest length, or a slice of short ones with the longest names."""
    longest = max(MAX_PATH_BLOCKS * KEY_BYTES, SLICE_BYTES) + SLICE * (4 * MAX_TEXT + 200)
    assert longest < MAX_CHUNK_BYTES < MAX_MESSAGE_BYTES
    assert longest < offers.MAX_BYTES


def test_the_file(snapshot: Snapshot, tmp_path: Path) -> None:
    write(tmp_path / "s", snapshot)
    assert read(tmp_path / "s").chunks == snapshot.chunks


class Lists:
    """A store that has lists."""

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}

    async def rpush(self, key: str, *values: bytes) -> None:
        self._lists.setdefault(key, []).extend(values)

    async def expire(self, key: str, _seconds: int) -> None:
        assert key in self._lists

    async def lrange(self, key: str, first: int, last: int) -> list[bytes]:
        return self._lists[key][first : last + 1]


async def test_the_store(snapshot: Snapshot) -> None:
    store, prefix = Lists(), "warmroute:{default}:"
    key = await offers.put(store, prefix, snapshot)
    assert (await offers.get(store, prefix, key, 100.0)).chunks == snapshot.chunks


def test_a_worker(snapshot: Snapshot) -> None:
    arrival, arrived = SnapshotReceiver(), None
    for part in frames_of(snapshot):
        frame = encode(SnapshotPart(1, part))
        assert len(frame) <= MAX_MESSAGE_BYTES
        arrived = arrival.receive(from_hub(frame))
    assert arrived == ReceivedSnapshot(1, snapshot)
