"""Collects what a router knows, for one that begins later: after a restart, or beside it.

The records come in slices, so that requests have their turns between them, and the router goes on changing meanwhile. So a
slice must not rely on what an earlier one has seen of the tree. It does not: a block key stands for all blocks before it, so
that a prefix once written can be extended by later records, whatever became of its nodes. What was dropped meanwhile is left
out; what was used again meanwhile is written with its new age; of a hold that a node above has taken over, that one is written.

A prefix is written where a replica's use of it ended, most recently used first, and behind all else: where a snapshot is cut,
the better half is left. What lies above such an end in the tree was used then too, and needs no record. Only confirmed blocks
are written: the bookings of requests in flight go another way (`replication_log.py`), or are over at a shutdown.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import Final

from router.index.holds import Hold
from router.router import Router
from router.snapshot.records import (
    LEAST,
    MAX_AGE_S,
    MAX_HELD,
    MAX_PATH_BLOCKS,
    MAX_TEXT,
    MOST,
    General,
    Held,
    Learned,
    ObjectEntry,
    PromiseEntry,
    Record,
    RentEntry,
    Scale,
    SessionEntry,
)
from router.types import KEY_BYTES

SLICE: Final = 200  # records: about a millisecond
MAX_PASSES: Final = 8  # over what was used during the pass before


def collect(router: Router, now: float, since_s: float = math.inf, size: int = SLICE) -> Iterator[list[Record]]:
    """What the router knows, in slices of `size` records, to be encoded one by one.

    since_s: only what was used in the last since_s seconds. Before the prefixes their ends are gathered at once: O(holds).
    """
    return _Collector(router, now, since_s).slices(size)


class _Collector:
    def __init__(self, router: Router, now: float, since_s: float) -> None:
        self._router = router
        self._now = now
        self._since = now - since_s
        self._numbers = {name: number for number, name in enumerate(router.replicas)}
        self._written: dict[bytes, tuple[int, int]] = {}  # last key of a path -> (number of a prefix, its leading blocks)
        self._held = 0

    def slices(self, size: int) -> Iterator[list[Record]]:
        records: list[Record] = []
        for record in self._records(size):
            records.append(record)
            if len(records) == size:
                yield records
                records = []
        yield records

    def _records(self, size: int) -> Iterator[Record]:
        yield self._general()
        for name in self._numbers:
            yield self._learned(name)
        yield from self._scales()
        yield from self._sessions()
        yield from self._promises()
        yield from self._objects()
        for prefix, seconds in self._router.rents.entries():
            yield RentEntry(prefix, seconds)
        yield from self._prefixes(size)  # at last: they may be too many

    def _age(self, at: float) -> float:
        return min(max(0.0, self._now - at), MAX_AGE_S)

    # -- learned values

    def _general(self) -> General:
        router = self._router
        lifetime = router.trie.lifetime
        sums = None
        if lifetime is not None and _plausible(lifetime.sums):
            over, under = lifetime.sums
            sums = over, under, lifetime.half_life
        return General(router.ledger.turn_gap.value, router.sessions.overall.sums, sums)

    def _learned(self, name: str) -> Learned:
        load, evidence = self._router.ledger.loads.get(name), self._router.evidence_of(name)
        rate, answered, age = None, 0.0, 0.0
        if load is not None:
            rate = load.rate.sums if _plausible(load.rate.sums) else None
            if load.answered_at > float("-inf"):
                answered, age = load.answered, self._age(load.answered_at)
        if evidence is None:  # it has left meanwhile
            return Learned(name, rate, answered, age, None, 0, False)
        return Learned(name, rate, answered, age, evidence.capacity, evidence.held, evidence.hits)

    def _scales(self) -> Iterator[Record]:
        for name, sums in self._router.scales.entries():
            if _plausible(sums) and _is_text(name):
                yield Scale(name, sums[0], sums[1])

    # -- the index

    def _prefixes(self, size: int) -> Iterator[Record]:
        """A use may replace holds, so what was used meanwhile is gathered again: at last `size` at once, without a pause."""
        trie, since = self._router.trie, self._since
        for number in range(MAX_PASSES):
            gathered = math.nextafter(trie.now, -math.inf)
            ends = [(name, trie.ends(name, since)) for name in self._numbers]
            if sum([len(each) for _, each in ends]) <= size or number == MAX_PASSES - 1:
                yield from list(self._written_of(ends))
                return
            yield from self._written_of(ends)
            since = gathered

    def _written_of(self, ends: list[tuple[str, list[Hold]]]) -> Iterator[Record]:
        for replica, hold in heapq.merge(*[_named(name, holds) for name, holds in ends], key=_staleness):
            if self._held == MAX_HELD:
                return
            alive = self._live(replica, hold)
            end = None if alive is None else _confirmed(replica, alive)
            if alive is not None and end is not None:
                yield self._prefix(self._numbers[replica], end, self._age(alive.used))

    def _live(self, replica: str, hold: Hold) -> Hold | None:
        """The hold, or what is left of it: the one above that has taken it over, or that was not dropped with it."""
        if self._router.trie.lives(replica, hold):
            return hold
        node = hold.node
        while node.parent is not None:
            found = node.holders.get(replica)
            if found is not None and self._router.trie.lives(replica, found):
                return found
            node = node.parent
        return None

    def _prefix(self, replica: int, end: Hold, age: float) -> Held:
        written, node = self._written, end.node
        pieces = [node.edge[: end.confirmed * KEY_BYTES]]
        known = written.get(pieces[0][-KEY_BYTES:])
        if known is not None:
            pieces = []
        parent = node.parent
        while known is None and parent is not None and parent.parent is not None:
            known = written.get(parent.edge[-KEY_BYTES:])
            if known is None:
                pieces.append(parent.edge)
            parent = parent.parent
        base, shared = known if known is not None else (0, 0)
        pieces.reverse()
        self._held += 1
        at = shared
        for piece in pieces:
            at += len(piece) // KEY_BYTES
            written[piece[-KEY_BYTES:]] = self._held, at
        keys = b"".join(pieces)[: (MAX_PATH_BLOCKS - shared) * KEY_BYTES]
        return Held(replica, base, shared, keys, node.weight, age)

    # -- sessions, promises, objects

    def _sessions(self) -> Iterator[Record]:
        numbers = self._numbers
        for number, session, returned in self._router.sessions.entries():
            holders = tuple(
                (numbers[name], units, self._age(at))
                for name, (units, at) in session.holders.items()
                if name in numbers and at > self._since
            )
            if holders:
                yield SessionEntry(number, returned, holders, session.share.sums if session.share is not None else None)

    def _promises(self) -> Iterator[Record]:
        for number, promise in self._router.promises.entries():
            replica = self._numbers.get(promise.replica)
            left_s = promise.until - self._now
            fits = 0 < promise.blocks <= MAX_PATH_BLOCKS
            if replica is not None and fits and left_s > 0 and promise.made > self._since:
                yield PromiseEntry(number, replica, promise.blocks, self._age(promise.made), left_s)

    def _objects(self) -> Iterator[Record]:
        for number, name, model, at in self._router.objects.entries():
            replica = self._numbers.get(name)
            if replica is not None and at > self._since and _is_text(model):
                yield ObjectEntry(number, replica, model, self._age(at))


def _plausible(sums: tuple[float, float]) -> bool:
    return LEAST <= sums[0] <= MOST and LEAST <= sums[1] <= MOST


def _is_text(name: str) -> bool:
    """Clients choose the names of models."""
    try:
        return len(name.encode()) <= MAX_TEXT
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _named(replica: str, ends: Iterable[Hold]) -> Iterator[tuple[str, Hold]]:
    for hold in ends:
        yield replica, hold


def _staleness(end: tuple[str, Hold]) -> float:
    return -end[1].used


def _confirmed(replica: str, hold: Hold) -> Hold | None:
    """The hold, or the deepest one above it that has confirmed blocks; None if there is none."""
    while hold.confirmed == 0:
        parent = hold.node.parent
        if parent is None or parent.parent is None:
            return None
        hold = parent.holders[replica]
    return hold
