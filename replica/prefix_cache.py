"""The simulated engine's KV cache: blocks of 16 tokens, named by a chained hash, the least recently used forgotten
first.

Theory of operation. A block key hashes a block's tokens and the key before it, so a key stands for a whole prefix.
Memory is a number of blocks. Each is in exactly one of four states:

    free                nobody's
    private             promised to a lease, content not known yet (or never to be shared: a partial last block)
    keyed, held         content known, in use by one lease or more
    keyed, idle         content known, in use by nobody: may be forgotten when memory is needed

`reserve` holds the cached head of a prompt and takes private blocks for the rest; `commit` names blocks once they are
computed; `release` gives all back, keyed blocks as idle. Idle blocks stand in order of last use, and a lease gives
back its tail first, so that a block is never forgotten before one that extends it.
"""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

BLOCK = 16


def block_keys(tokens: Items[int], size: int = BLOCK) -> list[int]:
    """Keys of the full blocks of a prompt. O(tokens). Python hashes tuples of ints the same in every process."""
    keys, key = [], 0
    for end in range(size, len(tokens) + 1, size):
        key = hash((key, *tokens[end - size : end]))
        keys.append(key)
    return keys


@dataclass(slots=True)
class Lease:
    """The blocks of one running request: `held` keys from its prompt's start, and `private` blocks after them."""

    private: int
    held: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Block:
    parent: int | None
    holders: int


class PrefixCache:
    """A cache of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least one block, got {capacity}")
        self.capacity = capacity
        self._blocks: dict[int, _Block] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._private = 0

    def __repr__(self) -> str:
        held = len(self._blocks) - len(self._idle)
        return f"<PrefixCache {self.capacity} blocks: {held} held, {len(self._idle)} idle, {self._private} private>"

    @property
    def used(self) -> int:
        """Blocks that running requests hold. O(1)."""
        return len(self._blocks) - len(self._idle) + self._private

    def match(self, keys: Items[int]) -> int:
        """How many leading blocks are cached; touches nothing. O(matched)."""
        return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def reserve(self, keys: Items[int], blocks: int) -> Lease | None:
        """Hold the cached head of `keys` and enough private blocks to make `blocks`; None if they do not fit now. O(blocks)."""
        matched = self.match(keys)
        need = max(0, blocks - matched)
        from_idle = sum(1 for key in keys[:matched] if key in self._idle)
        if need > self.capacity - self.used - from_idle:
            return None
        lease = Lease(private=need)
        for key in keys[:matched]:
            self._hold(lease, key)
        self._private += need
        while len(self._blocks) + self._private > self.capacity:
            forgotten, _ = self._idle.popitem(last=False)
            del self._blocks[forgotten]
        return lease

    def commit(self, lease: Lease, keys: Items[int]) -> None:
        """The lease's blocks up to `keys` (all from the prompt's start) are computed and may be shared. O(new keys)."""
        for key in keys[len(lease.held) :]:
            if lease.private == 0:
                raise ValueError("a lease cannot commit more blocks than it reserved")
            lease.private -= 1
            self._private -= 1
            if key not in self._blocks:
                self._blocks[key] = _Block(parent=lease.held[-1] if lease.held else None, holders=0)
                self._idle[key] = None
            # Somebody else computed the same block meanwhile: theirs is held, ours is free again.
            self._hold(lease, key)

    def release(self, lease: Lease) -> None:
        """Give everything back; a released lease is empty. O(held)."""
        self._private -= lease.private
        lease.private = 0
        for key in reversed(lease.held):
            block = self._blocks[key]
            block.holders -= 1
            if block.holders == 0:
                self._idle[key] = None
        lease.held.clear()

    def clear(self) -> None:
        """Forget every idle block. O(idle)."""
        for key in self._idle:
            del self._blocks[key]
        self._idle.clear()

    def check(self) -> None:
        """Prove the invariants. O(blocks)."""
        assert self._private >= 0
        assert len(self._blocks) + self._private <= self.capacity
        order = {key: at for at, key in enumerate(self._idle)}
        for key, block in self._blocks.items():
            assert block.holders >= 0
            assert (block.holders == 0) == (key in order)
            if block.parent is not None:
                assert block.parent in self._blocks, "a block outlived the one that it extends"
                if block.holders:
                    assert self._blocks[block.parent].holders >= block.holders
                assert block.parent not in order or (key in order and order[key] < order[block.parent])

    def _hold(self, lease: Lease, key: int) -> None:
        self._blocks[key].holders += 1
        self._idle.pop(key, None)
        lease.held.append(key)
