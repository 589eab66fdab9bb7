"""Restores a snapshot (`collect.py`) in a router, in slices.

Its state is applied as if this router had observed it: prefixes are inserted in the order of their last use, so that all bounds
hold, and the order of uses is the same as before. That holds for a new router. A router that has been used, or swept, treats
older entries as used just now, because its index is in order of use: so it should get few entries, or recent ones. State
learned by this router itself stays; only entries beyond its bounds are evicted. Entries past their TTL are omitted, and so is
all state of a replica that is another process here (older or newer).

A replica may join later than the snapshot is read (from a slow source of replicas): `steps` may be run again, and restores the
remaining state for replicas that have joined since. Until then the router has no state of them (except their objects, which may
be on their disks), because only then it is known if they are the same process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from router.index.holds import UNBOUNDED
from router.learning.promises import Promise
from router.router import Router
from router.snapshot.records import (
    MAX_PATH_BLOCKS,
    MAX_REPLICAS,
    MAX_TOTAL,
    GeneralRecord,
    HeldRecord,
    LearnedRecord,
    ObjectEntry,
    PromiseEntry,
    Record,
    RecordError,
    RentEntry,
    ScaleRecord,
    SessionEntry,
)
from router.types import KEY_BYTES, BlockKeys

STEP: Final = 100  # short inserts: one to three milliseconds; or other records
LOOKS: Final = 20  # skipped prefixes that take the time of an insert
RUN: Final = 1024  # prefixes sorted at once; at most as many of such runs are merged
STEP_BYTES: Final = 1 << 20  # of their keys, unless a single insert has more
MAX_BYTES: Final = 4 << 30  # of the keys of all prefixes including their bases; the least recently used ones are omitted
LINK_BYTES: Final = 64  # cost of visiting one base of a prefix
MAX_DEPTH: Final = 4096  # of a chain of prefixes: a path has 256 edges, which are sometimes cut


class Restorer:
    """Restores one snapshot (see the module). `add` all records, then run `steps`."""

    def __init__(self, router: Router, at: float, now: float, most_bytes: int = MAX_BYTES) -> None:
        """at: the moment of the snapshot, by this router's clock. most_bytes: see MAX_BYTES."""
        self.blocks = 0  # restored in the index, summed over replicas
        self.records = 0
        self._router = router
        self.at = at
        self._now = now
        self._most_bytes = most_bytes
        self._begins = not router.ledger.loads  # this router has booked nothing yet
        self._names: list[str] = []
        self._learned: list[LearnedRecord] = []
        self._held: list[HeldRecord] = []
        self._ends: list[int] = []  # blocks of each prefix
        self._depths: list[int] = []
        self._bytes = 0
        # Numbers of prefixes within most_bytes that are still to be restored. The runs are sorted, most recently used first.
        self._unsorted: list[int] = []
        self._runs: list[list[int]] = []
        self._others: list[Record] = []
        self._left: set[int] = set()  # replicas that are still unknown
        self._sessions: set[int] = set()  # restored sessions

    # -- reading

    def add(self, records: Iterable[Record]) -> None:
        """Add the next records. Raises RecordError for an invalid one."""
        for record in records:
            self.records += 1
            if self.records > MAX_TOTAL:
                raise RecordError("there are too many records")
            if isinstance(record, HeldRecord):
                self._add_held(record)
            elif isinstance(record, LearnedRecord):
                if len(self._names) == MAX_REPLICAS:
                    raise RecordError("there are too many replicas")
                self._left.add(len(self._names))
                self._names.append(record.name)
                self._learned.append(record)
            else:
                self._others.append(record)

    def _add_held(self, held: HeldRecord) -> None:
        base, keys = held.base, len(held.keys)
        if held.replica >= len(self._names) or base > len(self._held) or keys % KEY_BYTES:
            raise RecordError("a prefix refers to what is not there")
        before = self._ends[base - 1] if base else 0
        blocks = held.shared + keys // KEY_BYTES
        depth = self._depths[base - 1] if base else 0
        if held.shared > before or not 0 < blocks <= MAX_PATH_BLOCKS or depth >= MAX_DEPTH:
            raise RecordError("a prefix is longer than what it begins with, or too long")
        if base and not keys and held.shared == before:  # another replica holds the same prefix
            same = self._held[base - 1]
            held = HeldRecord(held.replica, same.base, same.shared, same.keys, held.weight, held.age)
            depth -= 1
        self._held.append(held)
        self._ends.append(blocks)
        self._depths.append(depth + 1)
        self._bytes += self._cost(len(self._held) - 1)
        if self._bytes <= self._most_bytes:
            self._unsorted.append(len(self._held) - 1)
            if len(self._unsorted) == RUN:
                self._sort()

    def _sort(self) -> None:
        if self._unsorted:
            self._unsorted.sort(key=self._age)
            self._runs.append(self._unsorted)
            self._unsorted = []

    def _age(self, number: int) -> float:
        return self._held[number].age

    def _staleness(self, number: int) -> float:
        return -self._held[number].age

    def _cost(self, number: int) -> int:
        """The cost of restoring a prefix."""
        return self._ends[number] * KEY_BYTES + self._depths[number] * LINK_BYTES

    @property
    def waiting(self) -> list[str]:
        """The unknown replicas, whose state is still to be restored."""
        return [self._names[replica] for replica in sorted(self._left)]

    # -- restoring

    def steps(self, has_restarted: Callable[[str], bool]) -> Iterator[None]:
        """Restore in steps of a few milliseconds at most; requests may have their turns between them.

        has_restarted: True if a replica, known to this router, is another process than in the snapshot, or has lost its cache
        since; called once for each.
        """
        same: set[int] = set()
        for count, number in enumerate(sorted(self._left)):
            if self._router.known(self._names[number]) is not None:
                self._left.remove(number)
                lost = has_restarted(self._names[number])
                self._restore_learned(self._learned[number], lost=lost)
                if not lost:
                    same.add(number)
            if count % STEP == 0:
                yield None
        self._router.ledger.rates.refresh()
        yield from self._restore_prefixes(same)
        yield from self._restore_others(same)
        if not self._left:
            yield from self.free()

    def free(self) -> Iterator[None]:
        """End the restoring. In steps, because freeing all records at once would be a pause."""
        self._left.clear()
        self._runs.clear()
        while self._held or self._others:
            del self._held[-RUN:], self._ends[-RUN:], self._depths[-RUN:], self._others[-RUN:]
            yield None

    def _restore_prefixes(self, replicas: set[int]) -> Iterator[None]:
        """Restore the prefixes of these replicas; prefixes of unknown ones stay."""
        left: list[int] = []
        inserts = looks = size = 0
        for number in self._least_recently_used_first():
            replica = self._held[number].replica
            if replica in replicas:
                self._insert(number)
                inserts, size = inserts + 1, size + self._cost(number)
            else:
                looks += 1
                if replica in self._left:
                    left.append(number)
            if inserts + looks // LOOKS >= STEP or size >= STEP_BYTES:
                inserts = looks = size = 0
                yield None
        left.reverse()
        self._runs = [left]

    def _least_recently_used_first(self) -> Iterator[int]:
        """The remaining prefixes, merged lazily. If ages are equal, the last one comes first."""
        self._sort()
        runs, self._runs = self._runs, []
        return heapq.merge(*map(reversed, reversed(runs)), key=self._staleness)

    def _insert(self, number: int) -> None:
        router, trie, held = self._router, self._router.trie, self._held[number]
        name, used = self._names[held.replica], self.at - held.age
        if used > max(self._now, trie.now) - trie.ttl_s and used > router.purged_at(name):
            trie.insert(name, self._keys(number), used, weight=held.weight)
            self.blocks += trie.credited

    def _keys(self, number: int) -> BlockKeys:
        pieces, cut = [], self._ends[number]
        while True:
            held = self._held[number]
            if cut > held.shared:
                pieces.append(held.keys[: (cut - held.shared) * KEY_BYTES])
                cut = held.shared
            if not held.base:
                break
            number = held.base - 1
        pieces.reverse()
        return b"".join(pieces)

    def _restore_learned(self, learned: LearnedRecord, *, lost: bool) -> None:
        router, name = self._router, learned.name
        if learned.rate is not None:
            router.ledger.restore(name, learned.rate, learned.answered, self.at - learned.answered_age)
        evidence = router.evidence_of(name)
        if evidence is None or lost:
            return
        evidence.restored(max(self._now, router.trie.now), hits=learned.hits)
        if evidence.learns_capacity and evidence.capacity is None and learned.capacity is not None:
            evidence.capacity = min(learned.capacity, UNBOUNDED - 1)
            evidence.held = max(evidence.held, learned.held)
            router.trie.add_replica(name, evidence.capacity)

    def _restore_others(self, replicas: set[int]) -> Iterator[None]:
        others, self._others = self._others, []
        others.reverse()
        while others:
            rest = self._restore_other(others.pop(), replicas)
            if rest is not None:
                self._others.append(rest)
            if len(others) % STEP == 0:
                yield None

    def _restore_other(self, record: Record, replicas: set[int]) -> Record | None:
        """Restore the record for these replicas. Returns the part for unknown ones."""
        router = self._router
        if isinstance(record, SessionEntry):
            return self._restore_session(record, replicas)
        if isinstance(record, PromiseEntry):
            if record.replica in self._left:
                return record
            if record.replica in replicas:
                made = self.at - record.age
                promise = Promise(self._names[record.replica], record.blocks, made, self.at + record.left_s)
                router.promises.restore(record.number, promise, self._now)
        elif isinstance(record, ScaleRecord):
            router.scales.restore(record.name, (record.units, record.tokens))
        elif isinstance(record, ObjectEntry):
            if record.replica < len(self._names):  # the object may be on the replica's disk
                router.objects.restore(record.number, self._names[record.replica], record.model, self.at - record.age)
        elif isinstance(record, RentEntry):
            if not router.rents.paid(record.prefix):
                router.rents.pay(record.prefix, record.seconds)
        elif isinstance(record, GeneralRecord):
            self._restore_general(record)
        return None

    def _restore_session(self, record: SessionEntry, replicas: set[int]) -> SessionEntry | None:
        sessions = self._router.sessions
        left = tuple(holder for holder in record.holders if holder[0] in self._left)
        holders = {self._names[number]: (units, self.at - age) for number, units, age in record.holders if number in replicas}
        if record.number in self._sessions:
            sessions.restore_more(record.number, holders)
        elif holders:
            if not sessions.restore(record.number, holders, record.share, returned=record.returned):
                return None  # the session is known here
            self._sessions.add(record.number)
        return SessionEntry(record.number, record.returned, left, record.share) if left else None

    def _restore_general(self, record: GeneralRecord) -> None:
        router = self._router
        if self._begins:
            router.ledger.turn_gap.restore(record.turn_gap)
            router.sessions.clients.restore(record.shares)
            if record.lifetime is not None:
                over, under, half_life = record.lifetime
                router.trie.restore_lifetime((over, under), half_life)

    def __repr__(self) -> str:
        return f"<Restorer of {self.records} records, {self.blocks} blocks taken in, for {len(self._left)} replicas left>"
