"""Collects the learned state of a router, for a router that begins later: after a restart, or beside it.

The records come in slices, so that requests have their turns between them, and the router changes meanwhile. So a slice must
not rely on an earlier slice's view of the tree. It does not: a block key stands for all earlier blocks, so that later records
can extend a written prefix even if its nodes are gone. Blocks that were dropped meanwhile are omitted; blocks that were used
again are written with their new age; if the hold of a node above has taken a hold over, that one is written.

A prefix is written at the end of each use by a replica (`ends.py`), most recently used first, and after all other records: so a
snapshot that is cut keeps the better half. Holds above such an end in the tree were used at the same time, and need no record.
Only confirmed blocks are written: the bookings of requests in flight are sent by the `replication_log.py`, or are over at a
shutdown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from router.index.holds import Hold
from router.router import Router
from router.snapshot.ends import EvictionEnds
from router.snapshot.records import (
    LEAST,
    MAX_AGE_S,
    MAX_HELD,
    MAX_PATH_BLOCKS,
    MAX_TEXT,
    MOST,
    GeneralRecord,
    HeldRecord,
    LearnedRecord,
    ObjectEntry,
    PromiseEntry,
    Record,
    RentEntry,
    ScaleRecord,
    SessionEntry,
)
from router.types import KEY_BYTES, BlockKeys

SLICE: Final = 200  # records, or checked items without a record: about a millisecond
SLICE_BYTES: Final = 1 << 20  # of the keys of its records, unless a single record has more
SLICE_EDGES: Final = 4096  # of the paths walked for it, unless a single record has more
PARTS: Final = 256
FREED: Final = 2000  # keys freed at once
MAX_PASSES: Final = 16  # over holds used during the previous pass; each is much shorter than the one before


def collect(router: Router, now: float, since_s: float = math.inf, size: int = SLICE) -> Iterator[list[Record]]:
    """The learned state in slices of at most `size` records, to be encoded one by one. A slice may be empty.

    since_s: only state used in the last since_s seconds. No slice takes more than a few milliseconds, even for a large index.
    """
    return _Collector(router, now, since_s).slices(size)


class _Collector:
    def __init__(self, router: Router, now: float, since_s: float) -> None:
        self._router = router
        self._now = now
        self._since = now - since_s
        self._numbers = {name: number for number, name in enumerate(router.replicas)}
        self._ends = EvictionEnds(router.trie, list(self._numbers))
        self._written = _WrittenRecords()
        self._held = 0
        self._edges = 0  # walked for the prefixes of this slice

    def slices(self, size: int) -> Iterator[list[Record]]:
        records: list[Record] = []
        done = keys = 0
        for record in self._records(size):
            more = len(record.keys) if isinstance(record, HeldRecord) else 0
            if keys and keys + more > SLICE_BYTES:
                yield records
                records, done, keys, self._edges = [], 0, 0, 0
            if record is not None:
                records.append(record)
            done, keys = done + 1, keys + more
            if done == size or self._edges >= SLICE_EDGES:
                yield records
                records, done, keys, self._edges = [], 0, 0, 0
        yield records
        while self._written.free():
            yield []

    def _records(self, size: int) -> Iterator[Record | None]:
        """The records; None for a checked item without a record."""
        yield self._general()
        for name in self._numbers:
            yield self._learned(name)
        yield from self._scales()
        yield from self._sessions()
        yield from self._promises()
        yield from self._objects()
        for prefix, seconds in self._router.rents.entries():
            yield RentEntry(prefix, seconds)
        yield from self._prefixes(size)  # last, because there may be too many

    def _age(self, at: float) -> float:
        return min(max(0.0, self._now - at), MAX_AGE_S)

    # -- learned values

    def _general(self) -> GeneralRecord:
        router = self._router
        lifetime = router.trie.lifetime
        sums = None
        if lifetime is not None and _plausible(lifetime.sums):
            over, under = lifetime.sums
            sums = over, under, lifetime.half_life
        return GeneralRecord(router.ledger.turn_gap.value, router.sessions.clients.sums, sums)

    def _learned(self, name: str) -> LearnedRecord:
        load, evidence = self._router.ledger.loads.get(name), self._router.evidence_of(name)
        rate, answered, age = None, 0.0, 0.0
        if load is not None:
            rate = load.rate.sums if _plausible(load.rate.sums) else None
            if load.answered_at > float("-inf"):
                answered, age = load.answered, self._age(load.answered_at)
        if evidence is None:  # the replica has left
            return LearnedRecord(name, rate, answered, age, None, 0, False)
        return LearnedRecord(name, rate, answered, age, evidence.capacity, evidence.held, evidence.hits)

    def _scales(self) -> Iterator[Record]:
        for name, sums in self._router.scales.entries():
            if _plausible(sums) and _is_text(name):
                yield ScaleRecord(name, sums[0], sums[1])

    # -- the index

    def _prefixes(self, size: int) -> Iterator[Record | None]:
        """A use may replace holds, so holds used during one pass are written by the next, until there are few: `_rest`."""
        trie, since = self._router.trie, self._since
        for _ in range(MAX_PASSES):
            begun = math.nextafter(trie.now, -math.inf)
            records, left = self._rest(since, size)
            yield from records
            if left <= since:
                return
            for end in self._ends.walk(since, left):
                if self._held == MAX_HELD:
                    return
                yield self._record(*end) if end is not None else None
            since = begun

    def _rest(self, since: float, most: int) -> tuple[list[Record], float]:
        """(records of the ends used after `since`, if they fit into one slice and are made at once; the time up to which uses
        are still to be written)
        """
        records: list[Record] = []
        ends, keys = self._ends.few(since, most), 0
        if ends is None:
            return records, math.inf
        for replica, hold in ends:
            if self._held == MAX_HELD:
                break
            if keys >= SLICE_BYTES:
                return records, hold.used
            record = self._record(replica, hold)
            if record is not None:
                records.append(record)
                keys += len(record.keys)
        return records, since

    def _record(self, replica: str, hold: Hold) -> HeldRecord | None:
        alive = self._live(replica, hold)
        end = None if alive is None else _confirmed(replica, alive)
        if alive is None or end is None:
            return None
        return self._prefix(self._numbers[replica], end, self._age(alive.used))

    def _live(self, replica: str, hold: Hold) -> Hold | None:
        """The hold if it is live, or else the hold above that has taken it over or was not dropped with it."""
        if self._router.trie.lives(replica, hold):
            return hold
        node = hold.node
        while node.parent is not None:
            found = node.holders.get(replica)
            if found is not None and self._router.trie.lives(replica, found):
                return found
            node = node.parent
        return None

    def _prefix(self, replica: int, end: Hold, age: float) -> HeldRecord:
        written, node, cut = self._written, end.node, end.confirmed * KEY_BYTES
        pieces: list[BlockKeys] = []
        known = written.find(node.edge[cut - KEY_BYTES : cut])
        if known is None:
            pieces.append(node.edge[:cut])
        parent = node.parent
        while known is None and parent is not None and parent.parent is not None:
            known = written.find(parent.edge[-KEY_BYTES:])
            if known is None:
                pieces.append(parent.edge)
            parent = parent.parent
        base, shared = known if known is not None else (0, 0)
        pieces.reverse()
        self._held += 1
        self._edges += len(pieces)
        at = shared
        for piece in pieces:
            at += len(piece) // KEY_BYTES
            if at <= MAX_PATH_BLOCKS:  # blocks of a longer path beyond it are omitted
                written.put(piece[-KEY_BYTES:], self._held, at)
        keys = b"".join(pieces)[: (MAX_PATH_BLOCKS - shared) * KEY_BYTES]
        return HeldRecord(replica, base, shared, keys, node.weight, age)

    # -- sessions, promises, objects

    def _sessions(self) -> Iterator[Record | None]:
        numbers = self._numbers
        for number, session, returned in self._router.sessions.entries():
            holders = tuple(
                (numbers[name], units, self._age(at))
                for name, (units, at) in session.holders.items()
                if name in numbers and at > self._since
            )
            share = session.share.sums if session.share is not None else None
            yield SessionEntry(number, returned, holders, share) if holders else None

    def _promises(self) -> Iterator[Record | None]:
        for number, promise in self._router.promises.entries():
            replica = self._numbers.get(promise.replica)
            left_s = promise.until - self._now
            fits = 0 < promise.blocks <= MAX_PATH_BLOCKS
            if replica is not None and fits and left_s > 0 and promise.made > self._since:
                yield PromiseEntry(number, replica, promise.blocks, self._age(promise.made), left_s)
            else:
                yield None

    def _objects(self) -> Iterator[Record | None]:
        for number, name, model, at in self._router.objects.entries():
            replica = self._numbers.get(name)
            if replica is not None and at > self._since and _is_text(model):
                yield ObjectEntry(number, replica, model, self._age(at))
            else:
                yield None


class _WrittenRecords:
    """The end of each written path: last key -> number of a prefix, and its leading blocks. O(1).

    In many dictionaries, because a large one pauses longer when it grows or is freed.
    """

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(PARTS)]

    def find(self, key: bytes) -> tuple[int, int] | None:
        found = self._parts[key[0]].get(key)
        return None if found is None else divmod(found, MAX_PATH_BLOCKS + 1)

    def put(self, key: bytes, number: int, blocks: int) -> None:
        """blocks: MAX_PATH_BLOCKS at most."""
        self._parts[key[0]][key] = number * (MAX_PATH_BLOCKS + 1) + blocks

    def free(self) -> bool:
        """Free a part. Returns True if there was one."""
        freed = 0
        while self._parts and freed < FREED:
            freed += len(self._parts.pop())
        return freed > 0


def _plausible(sums: tuple[float, float]) -> bool:
    return LEAST <= sums[0] <= MOST and LEAST <= sums[1] <= MOST


def _is_text(name: str) -> bool:
    """True if a name can be encoded; clients choose the names of models."""
    try:
        return len(name.encode()) <= MAX_TEXT
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _confirmed(replica: str, hold: Hold) -> Hold | None:
    """The hold, or the deepest one above it that has confirmed blocks; None if there is none."""
    while hold.confirmed == 0:
        parent = hold.node.parent
        if parent is None or parent.parent is None:
            return None
        hold = parent.holders[replica]
    return hold
