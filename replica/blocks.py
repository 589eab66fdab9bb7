"""Which block of KV memory holds what: the ledger of the prefix cache, of both engines.

Theory of operation. KV memory is `capacity` blocks of `size` tokens, numbered from `first`; what is in them is the engine's
business. A full block has a key, which stands for all tokens up to its end (`replica/prefix.py`). Each block is in exactly
one of four states:

    free            nobody's, and nothing worth keeping in it
    own             taken by a lease, without a key: not computed yet, or not full
    named, held     computed and shared, in use by one lease or more
    named, idle     computed and shared, in use by nobody: may be evicted

`reserve` holds the cached head of a prompt and takes own blocks behind it; `grow` takes more; `commit` names those that
are computed; `release` gives all back, named blocks as idle. What to evict is decided when a block is needed, one at a
time: of the idle blocks that nobody asked to keep any longer the least recently used; when there are none, the one whose
time is up first. So retention is a preference that never keeps a request waiting.

Invariants. A named block's parent is named, held if the block is, and otherwise both later used and kept at least as
long: a lease holds whole prefixes, and gives its tail back first. So no block outlives its parent, and tails go before
heads. Sinks hear of every name that appears or goes, parents first when it appears. Time is an argument.

The heaps keep entries that are out of date (their stamp is not the block's); these are skipped when they come up, and
swept out when they are many.
"""

import heapq
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from replica.prefix import Key, Prefix, Run


class Sink(Protocol):
    """Hears what is in the cache, in the thread that changes it: it must not wait."""

    def stored(self, run: Run) -> None: ...

    def removed(self, key: Key) -> None: ...

    def cleared(self) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one running request in their order; the first `named` of them may be shared."""

    prefix: Prefix
    keep_s: float
    blocks: list[int]
    named: int


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Blocks: what happened since the start, and what there is now. `evicted_kept` went before their time was up."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    evicted_kept: int = 0
    held: int = 0
    idle: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle block, as a checkpoint needs it."""

    key: Key
    parent: Key | None
    block: int
    keep_until: float


@dataclass(slots=True, eq=False)
class _Named:
    key: Key
    parent: Key | None
    block: int
    holders: int = 0
    stamp: int = 0
    keep_until: float = 0.0


class BlockLedger:
    """See the module. Not for several threads at once; the properties may be read from any."""

    def __init__(self, capacity: int, size: int, sinks: Items[Sink] = (), first: int = 0) -> None:
        if capacity < 1 or size < 1:
            raise ValueError(f"a cache has at least one block of one token, got {capacity} of {size}")
        self.capacity, self.size = capacity, size
        self._sinks = sinks
        self._all = range(first, first + capacity)
        self._free = list(self._all)
        self._named: dict[Key, _Named] = {}
        self._idle = 0
        self._plain: list[tuple[int, Key]] = []  # a heap by stamp: idle blocks that nobody asked to keep
        self._kept: list[tuple[float, int, Key]] = []  # a heap by the end of their time, then stamp
        self._stamp = 0
        self._hits = self._misses = self._evicted = self._evicted_kept = 0

    def __repr__(self) -> str:
        counts = self.counts()
        own = self.used - counts.held
        return f"<BlockLedger {self.capacity} blocks: {counts.held} held, {own} own, {self._idle} idle, {counts.free} free>"

    @property
    def used(self) -> int:
        """Blocks that leases have. O(1)."""
        return self.capacity - self.room

    @property
    def room(self) -> int:
        """Blocks that a lease can get. O(1)."""
        return len(self._free) + self._idle

    def counts(self) -> CacheCounts:
        """O(1)."""
        held = len(self._named) - self._idle
        return CacheCounts(self._hits, self._misses, self._evicted, self._evicted_kept, held, self._idle, free=len(self._free))

    def match(self, keys: Items[Key]) -> int:
        """How many leading blocks are cached; touches nothing. O(matched)."""
        return next((at for at, key in enumerate(keys) if key not in self._named), len(keys))

    def reserve(self, prefix: Prefix, blocks: int, now: float, keep_s: float = 0.0) -> Lease | None:
        """Hold the cached head of a prompt and own blocks behind it to make `blocks`; None, and nothing done, if they do
        not fit now. What it names is kept for `keep_s` after its release. O(blocks log capacity)."""
        matchable = min(prefix.matchable, len(prefix.keys))
        hits = [self._named[key] for key in prefix.keys[: self.match(prefix.keys[:matchable])]]
        need = max(0, blocks - len(hits))
        if need > self.room - sum(block.holders == 0 for block in hits):
            return None
        for block in hits:
            self._hold(block)
        self._hits += len(hits)
        self._misses += matchable - len(hits)
        return Lease(prefix, keep_s, [block.block for block in hits] + self._take(need, now), len(hits))

    def grow(self, lease: Lease, blocks: int, now: float) -> bool:
        """Make the lease's blocks at least `blocks`; False, and nothing done, if they do not fit now. O(new log capacity)."""
        need = max(0, blocks - len(lease.blocks))
        if need > self.room:
            return False
        lease.blocks += self._take(need, now)
        return True

    def commit(self, lease: Lease, blocks: int) -> None:
        """The lease's first `blocks` blocks are computed and may be shared. `lease.blocks` changes where somebody else has
        computed the same meanwhile: theirs is held, ours is free again. O(new blocks)."""
        if blocks > min(len(lease.blocks), len(lease.prefix.keys)):
            raise ValueError(f"cannot name {blocks} blocks of {len(lease.blocks)}, {len(lease.prefix.keys)} of them full")
        first = fresh = max(lease.named, blocks)
        for at in range(lease.named, blocks):
            key = lease.prefix.keys[at]
            named = self._named.get(key)
            if named is None:
                first = min(first, at)
                named = self._named[key] = _Named(key, lease.prefix.parent(at), lease.blocks[at], holders=1)
            else:
                self._hold(named)
                self._free.append(lease.blocks[at])
                lease.blocks[at] = named.block
        lease.named = fresh
        if first < fresh:  # a cached block's parent is cached, so the new ones are the last ones
            tokens = lease.prefix.tokens[first * self.size : fresh * self.size]
            run = Run(tuple(lease.prefix.keys[first:fresh]), lease.prefix.parent(first), tokens, lease.prefix.scope)
            for sink in self._sinks:
                sink.stored(run)

    def release(self, lease: Lease, now: float) -> None:
        """Give everything back; a released lease is empty. O(blocks log capacity)."""
        self._free += lease.blocks[lease.named :]
        for key in reversed(lease.prefix.keys[: lease.named]):
            block = self._named[key]
            block.holders -= 1
            if lease.keep_s:
                block.keep_until = max(block.keep_until, now + lease.keep_s)
            if block.holders == 0:
                self._rest(block, now)
        lease.blocks.clear()
        lease.named = 0
        self._sweep(now)

    def clear(self) -> bool:
        """Forget all; False, and nothing done, while a lease has blocks. O(capacity)."""
        if self.used:
            return False
        self._free = list(self._all)
        self._named.clear()
        self._plain.clear()
        self._kept.clear()
        self._idle = 0
        for sink in self._sinks:
            sink.cleared()
        return True

    def idle(self) -> list[Idle]:
        """The idle blocks, the least recently used first. O(capacity log capacity)."""
        blocks = sorted((named for named in self._named.values() if not named.holders), key=lambda named: named.stamp)
        return [Idle(named.key, named.parent, named.block, named.keep_until) for named in blocks]

    def adopt(self, blocks: Items[tuple[Run, float]], now: float) -> list[int]:
        """Take in blocks of an earlier life, in the order of `idle`, each a run of one, with the end of its time; the block
        numbers that they get. Only into an empty cache that they fit into. O(blocks log capacity)."""
        if self._named or len(blocks) > len(self._free):
            raise ValueError(f"cannot take {len(blocks)} blocks into {self!r}")
        numbers = []
        for run, keep_until in blocks:
            named = self._named[run.keys[0]] = _Named(run.keys[0], run.parent, self._free.pop(), keep_until=keep_until)
            numbers.append(named.block)
            self._rest(named, now)
        for joined in _joined([run for run, _ in reversed(blocks)]):
            for sink in self._sinks:
                sink.stored(joined)
        return numbers

    def check(self) -> None:
        """Prove the invariants. O(capacity)."""
        blocks = [*self._free, *(named.block for named in self._named.values())]
        assert len(set(blocks)) == len(blocks), "a block is in two places"
        assert set(blocks) <= set(self._all)
        assert self._idle == sum(named.holders == 0 for named in self._named.values())
        entries = {(stamp, key) for stamp, key in self._plain} | {(stamp, key) for _, stamp, key in self._kept}
        assert len(self._plain) + len(self._kept) <= 2 * self.capacity, "old entries pile up"
        for named in self._named.values():
            assert named.holders >= 0
            assert named.holders > 0 or (named.stamp, named.key) in entries, "an idle block that cannot be evicted"
            if named.parent is not None:
                assert named.parent in self._named, "a block outlived the one that it extends"
                parent = self._named[named.parent]
                assert parent.holders >= named.holders
                assert parent.holders or parent.stamp > named.stamp
                assert parent.keep_until >= named.keep_until

    def _hold(self, named: _Named) -> None:
        self._idle -= named.holders == 0
        named.holders += 1

    def _rest(self, named: _Named, now: float) -> None:
        """A block is idle from now on."""
        self._stamp += 1
        self._idle += 1
        named.stamp = self._stamp
        self._enqueue(named, now)

    def _enqueue(self, named: _Named, now: float) -> None:
        if named.keep_until > now:
            heapq.heappush(self._kept, (named.keep_until, named.stamp, named.key))
        else:
            heapq.heappush(self._plain, (named.stamp, named.key))

    def _take(self, blocks: int, now: float) -> list[int]:
        while len(self._free) < blocks:
            self._evict(now)
        return [self._free.pop() for _ in range(blocks)]

    def _evict(self, now: float) -> None:
        while self._kept and self._kept[0][0] <= now:
            _, stamp, key = heapq.heappop(self._kept)
            if self._idle_since(key, stamp):
                heapq.heappush(self._plain, (stamp, key))
        victim = None
        while victim is None and self._plain:
            stamp, key = heapq.heappop(self._plain)
            victim = self._idle_since(key, stamp)
        while victim is None:
            _, stamp, key = heapq.heappop(self._kept)
            victim = self._idle_since(key, stamp)
            self._evicted_kept += victim is not None
        self._evicted += 1
        self._idle -= 1
        del self._named[victim.key]
        self._free.append(victim.block)
        for sink in self._sinks:
            sink.removed(victim.key)

    def _idle_since(self, key: Key, stamp: int) -> _Named | None:
        named = self._named.get(key)
        return named if named is not None and named.holders == 0 and named.stamp == stamp else None

    def _sweep(self, now: float) -> None:
        """Out with what is out of date, once it is as much as the rest can be."""
        if len(self._plain) + len(self._kept) <= 2 * self.capacity:
            return
        self._plain.clear()
        self._kept.clear()
        for named in self._named.values():
            if named.holders == 0:
                self._enqueue(named, now)


def _joined(runs: list[Run]) -> Iterator[Run]:
    """Runs of one block, parents first, with each that extends the one before it joined to it."""
    cuts = [at for at, (one, two) in enumerate(pairwise(runs), 1) if two.parent != one.keys[0]]
    for begin, end in pairwise([0, *cuts, len(runs)] if runs else []):
        tokens = array("I")
        for run in runs[begin:end]:
            tokens += run.tokens
        yield Run(tuple(run.keys[0] for run in runs[begin:end]), runs[begin].parent, tokens, runs[begin].scope)
