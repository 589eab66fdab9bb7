"""The block ledger of the prefix cache, used by both engines: the owner, key and state of each block of KV memory.

Theory of operation. KV memory is `capacity` blocks of `size` tokens, numbered from `first`; the engine owns their contents. A
full block has a key, which stands for all tokens up to its end (`prefix.py`). Each block is in exactly one of four states:

    free            no owner, contents worthless
    private         belongs to one lease, has no key: not computed yet, or not full
    cached, held    computed and shared, used by one lease or more
    cached, idle    computed and shared, used by no lease: may be evicted

`reserve` holds the cached head of a prompt, takes private blocks after it and promises others, for which room is kept; `grow`
takes more, promised ones first; `rematch` holds blocks of the prompt that became cached meanwhile; `commit` makes computed
blocks cached; `release` returns all blocks, cached ones as idle. So a shared block counts once, however many requests are
promised the rest. The hits of a prompt are counted when its lease takes the first private block: until then more blocks may
become cached. Eviction happens when a block is needed, one block at a time: of the idle blocks without retention, or with
expired retention, the least recently used one; if there are none, the one with the earliest end of retention. So retention is
a preference that never makes a request wait.

Invariants. A cached block's parent is cached, held if the block is, and otherwise both used later and retained at least as
long: a lease holds whole prefixes, and releases its tail first. So no block outlives its parent, and tails are evicted before
heads. Listeners are called for every key that appears or disappears, parents first when they appear. Time is an argument.

The heaps keep outdated entries (their stamp is not the block's); these are skipped when they reach the top, and removed when
there are many.
"""

import heapq
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from replica.cache.prefix import BlockRun, Key, Prefix


class CacheListener(Protocol):
    """Called for each change of the cache, in the thread that makes it: it must not block."""

    def stored(self, run: BlockRun) -> None: ...

    def removed(self, key: Key) -> None: ...

    def cleared(self) -> None: ...


@dataclass(slots=True, eq=False)
class BlockLease:
    """The blocks of one running request, in order; the first `shared` of them are cached. `promised`: the number of further
    blocks that it is guaranteed. `counted`: its hits and misses are in the counts.
    """

    prefix: Prefix
    keep_s: float
    blocks: list[int]
    shared: int
    promised: int = 0
    counted: bool = False


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Blocks: looked up and evicted since the start; by state now. `evicted_kept`: evicted before their retention ended."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    evicted_kept: int = 0
    held: int = 0
    idle: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class IdleBlock:
    """An idle block, for a checkpoint."""

    key: Key
    parent: Key | None
    block: int
    keep_until: float


@dataclass(slots=True, eq=False)
class _CachedBlock:
    key: Key
    parent: Key | None
    block: int
    holders: int = 0
    stamp: int = 0
    keep_until: float = 0.0


class BlockLedger:
    """See the module. Not thread-safe, but the properties may be read from any thread."""

    def __init__(self, capacity: int, size: int, listeners: Items[CacheListener] = (), first: int = 0) -> None:
        if capacity < 1 or size < 1:
            raise ValueError(f"a cache has at least one block of one token, got {capacity} of {size}")
        self.capacity, self.size = capacity, size
        self._sinks = listeners
        self._all = range(first, first + capacity)
        self._free = list(self._all)
        self._cached: dict[Key, _CachedBlock] = {}
        self._idle = 0
        self._promised = 0
        self._lru: list[tuple[int, Key]] = []  # a heap by stamp: idle blocks without retention
        self._retained: list[tuple[float, int, Key]] = []  # a heap by the end of retention, then stamp
        self._stamp = 0
        self._hits = self._misses = self._evicted = self._evicted_kept = 0

    def __repr__(self) -> str:
        counts = self.counts()
        private = self.used - counts.held
        states = f"{counts.held} held, {private} private, {counts.idle} idle, {counts.free} free"
        return f"<BlockLedger {self.capacity} blocks: {states}>"

    @property
    def used(self) -> int:
        """Blocks held by leases. O(1)."""
        return self.capacity - self.room

    @property
    def room(self) -> int:
        """Free and idle blocks. O(1)."""
        return len(self._free) + self._idle

    @property
    def spare(self) -> int:
        """Free and idle blocks that are promised to no lease. O(1)."""
        return self.room - self._promised

    def counts(self) -> CacheCounts:
        """O(1)."""
        held = len(self._cached) - self._idle
        return CacheCounts(self._hits, self._misses, self._evicted, self._evicted_kept, held, self._idle, free=len(self._free))

    def match(self, keys: Items[Key]) -> int:
        """The number of leading blocks that are cached; changes nothing. O(matched)."""
        return next((at for at, key in enumerate(keys) if key not in self._cached), len(keys))

    def reserve(self, prefix: Prefix, blocks: int, now: float, keep_s: float = 0.0, *, most: int = 0) -> BlockLease | None:
        """Hold the cached head of a prompt, take private blocks after it to make `blocks`, and promise more to make `most`.
        Returns None, and changes nothing, if they do not fit now. The cached blocks are retained for `keep_s` after the
        release. O(blocks log capacity).
        """
        hits = [self._cached[key] for key in prefix.keys[: self.match(prefix.keys[: prefix.matchable])]]
        need = max(0, blocks - len(hits))
        promised = max(0, most - len(hits) - need)
        if need + promised > self.spare - sum(block.holders == 0 for block in hits):
            return None
        for block in hits:
            self._hold(block)
        self._promised += promised
        lease = BlockLease(prefix, keep_s, [block.block for block in hits], len(hits), promised)
        self._extend(lease, need, now)
        return lease

    def grow(self, lease: BlockLease, blocks: int, now: float) -> bool:
        """Make the lease's blocks at least `blocks`; False, and nothing changed, if they do not fit. O(new log capacity)."""
        need = max(0, blocks - len(lease.blocks))
        if need - lease.promised > self.spare:
            return False
        self._keep_promise(lease, need)
        self._extend(lease, need, now)
        return True

    def rematch(self, lease: BlockLease) -> None:
        """Hold the blocks of the lease's prompt that became cached after `reserve`. Only while the lease has no private blocks.
        O(new blocks).
        """
        if len(lease.blocks) > lease.shared:
            raise ValueError(f"{len(lease.blocks) - lease.shared} of its blocks may be computed already")
        keys = lease.prefix.keys[lease.shared : lease.prefix.matchable]
        hits = [self._cached[key] for key in keys[: self.match(keys)]]
        if len(hits) > lease.promised:
            raise ValueError(f"{len(hits)} more blocks are cached, and it was promised {lease.promised}")
        for block in hits:
            self._hold(block)
        self._keep_promise(lease, len(hits))
        lease.blocks += [block.block for block in hits]
        lease.shared += len(hits)

    def commit(self, lease: BlockLease, blocks: int) -> None:
        """Make the lease's first `blocks` blocks cached: they are computed. `lease.blocks` changes where another lease has
        computed the same block meanwhile: that block is held, this lease's is freed. O(new blocks).
        """
        if blocks > min(len(lease.blocks), len(lease.prefix.keys)):
            raise ValueError(f"cannot cache {blocks} blocks of {len(lease.blocks)}, {len(lease.prefix.keys)} of them full")
        first = fresh = max(lease.shared, blocks)
        for at in range(lease.shared, blocks):
            key = lease.prefix.keys[at]
            cached = self._cached.get(key)
            if cached is None:
                first = min(first, at)
                cached = self._cached[key] = _CachedBlock(key, lease.prefix.parent(at), lease.blocks[at], holders=1)
            else:
                self._hold(cached)
                self._free.append(lease.blocks[at])
                lease.blocks[at] = cached.block
        lease.shared = fresh
        if first < fresh:  # a cached block's parent is cached, so the new ones are at the end
            tokens = lease.prefix.tokens[first * self.size : fresh * self.size]
            run = BlockRun(tuple(lease.prefix.keys[first:fresh]), lease.prefix.parent(first), tokens, lease.prefix.scope)
            for listener in self._sinks:
                listener.stored(run)

    def release(self, lease: BlockLease, now: float) -> None:
        """Return all blocks of a lease, which is empty afterwards. O(blocks log capacity)."""
        self._free += lease.blocks[lease.shared :]
        for key in reversed(lease.prefix.keys[: lease.shared]):
            block = self._cached[key]
            block.holders -= 1
            if lease.keep_s:
                block.keep_until = max(block.keep_until, now + lease.keep_s)
            if block.holders == 0:
                self._set_idle(block, now)
        lease.blocks.clear()
        lease.shared = 0
        self._keep_promise(lease, lease.promised)
        self._sweep(now)

    def clear(self) -> bool:
        """Drop all cached blocks; False, and nothing changed, while a lease has blocks, or is promised some. O(capacity)."""
        if self.used or self._promised:
            return False
        self._free = list(self._all)
        self._cached.clear()
        self._lru.clear()
        self._retained.clear()
        self._idle = 0
        for listener in self._sinks:
            listener.cleared()
        return True

    def idle(self) -> list[IdleBlock]:
        """The idle blocks, the least recently used first. O(capacity log capacity)."""
        blocks = sorted((cached for cached in self._cached.values() if not cached.holders), key=lambda cached: cached.stamp)
        return [IdleBlock(cached.key, cached.parent, cached.block, cached.keep_until) for cached in blocks]

    def adopt(self, blocks: Items[tuple[BlockRun, float]], now: float) -> list[int]:
        """Add blocks of an earlier process, in the order of `idle()`, each a run of one block with the end of its retention.
        Returns their new block numbers. Only for an empty cache that has room for them. O(blocks log capacity)."""
        if self._cached or len(blocks) > len(self._free):
            raise ValueError(f"cannot add {len(blocks)} blocks to {self!r}")
        numbers = []
        for run, keep_until in blocks:
            cached = self._cached[run.keys[0]] = _CachedBlock(run.keys[0], run.parent, self._free.pop(), keep_until=keep_until)
            numbers.append(cached.block)
            self._set_idle(cached, now)
        for joined in _joined([run for run, _ in reversed(blocks)]):
            for listener in self._sinks:
                listener.stored(joined)
        return numbers

    def check(self) -> None:
        """Assert the invariants. O(capacity)."""
        blocks = [*self._free, *(cached.block for cached in self._cached.values())]
        assert len(set(blocks)) == len(blocks), "a block is in two states"
        assert set(blocks) <= set(self._all)
        assert 0 <= self._promised <= self.room, "more is promised than there is"
        assert self._idle == sum(cached.holders == 0 for cached in self._cached.values())
        entries = {(stamp, key) for stamp, key in self._lru} | {(stamp, key) for _, stamp, key in self._retained}
        assert len(self._lru) + len(self._retained) <= 2 * self.capacity, "outdated entries accumulate"
        for cached in self._cached.values():
            assert cached.holders >= 0
            assert cached.holders > 0 or (cached.stamp, cached.key) in entries, "an idle block that cannot be evicted"
            if cached.parent is not None:
                assert cached.parent in self._cached, "a block outlived its parent"
                parent = self._cached[cached.parent]
                assert parent.holders >= cached.holders
                assert parent.holders or parent.stamp > cached.stamp
                assert parent.keep_until >= cached.keep_until

    def _keep_promise(self, lease: BlockLease, blocks: int) -> None:
        """Reduce the lease's promise by `blocks`: they are taken, or no longer needed."""
        kept = min(lease.promised, blocks)
        lease.promised -= kept
        self._promised -= kept

    def _hold(self, cached: _CachedBlock) -> None:
        self._idle -= cached.holders == 0
        cached.holders += 1

    def _set_idle(self, cached: _CachedBlock, now: float) -> None:
        """Make a block without holders idle."""
        self._stamp += 1
        self._idle += 1
        cached.stamp = self._stamp
        self._enqueue(cached, now)

    def _enqueue(self, cached: _CachedBlock, now: float) -> None:
        if cached.keep_until > now:
            heapq.heappush(self._retained, (cached.keep_until, cached.stamp, cached.key))
        else:
            heapq.heappush(self._lru, (cached.stamp, cached.key))

    def _extend(self, lease: BlockLease, blocks: int, now: float) -> None:
        """Give the lease private blocks. With the first one its prompt's hits and misses are final and are counted."""
        if blocks and not lease.counted:
            lease.counted = True
            self._hits += lease.shared
            self._misses += lease.prefix.matchable - lease.shared
        lease.blocks += self._take(blocks, now)

    def _take(self, blocks: int, now: float) -> list[int]:
        while len(self._free) < blocks:
            self._evict(now)
        return [self._free.pop() for _ in range(blocks)]

    def _evict(self, now: float) -> None:
        while self._retained and self._retained[0][0] <= now:
            _, stamp, key = heapq.heappop(self._retained)
            if self._idle_since(key, stamp):
                heapq.heappush(self._lru, (stamp, key))
        victim = None
        while victim is None and self._lru:
            stamp, key = heapq.heappop(self._lru)
            victim = self._idle_since(key, stamp)
        while victim is None:
            _, stamp, key = heapq.heappop(self._retained)
            victim = self._idle_since(key, stamp)
            self._evicted_kept += victim is not None
        self._evicted += 1
        self._idle -= 1
        del self._cached[victim.key]
        self._free.append(victim.block)
        for listener in self._sinks:
            listener.removed(victim.key)

    def _idle_since(self, key: Key, stamp: int) -> _CachedBlock | None:
        cached = self._cached.get(key)
        return cached if cached is not None and cached.holders == 0 and cached.stamp == stamp else None

    def _sweep(self, now: float) -> None:
        """Rebuild the heaps once at least half of their entries may be outdated."""
        if len(self._lru) + len(self._retained) <= 2 * self.capacity:
            return
        self._lru.clear()
        self._retained.clear()
        for cached in self._cached.values():
            if cached.holders == 0:
                self._enqueue(cached, now)


def _joined(runs: list[BlockRun]) -> Iterator[BlockRun]:
    """Runs of one block, parents first; a run that extends the run before it is joined to it."""
    cuts = [at for at, (one, two) in enumerate(pairwise(runs), 1) if two.parent != one.keys[0]]
    for begin, end in pairwise([0, *cuts, len(runs)] if runs else []):
        tokens = array("I")
        for run in runs[begin:end]:
            tokens += run.tokens
        yield BlockRun(tuple(run.keys[0] for run in runs[begin:end]), runs[begin].parent, tokens, runs[begin].scope)
