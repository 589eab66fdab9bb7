"""The prefix index within its bounds: the prefixes that each replica is believed to hold.

`tree.py` has its structure; this file credits and evicts:

- `insert` credits a replica with a prompt. A pending credit (of a request in flight) evicts nothing: it counts neither against
  the replica's capacity nor, up to a share of the memory bound, against that bound; blocks beyond the share are not credited.
  Up to the weight of `back` it hides the blocks that it will evict. `confirm` makes it a firm one, once the engine has counted
  the prompt, and enforces the bounds. `take_back` removes its pending part, except blocks that other prompts
  of the replica extend.
- TTL since last use, capacity (weight of a replica's blocks) and memory (bytes of all) drop holds from the stale ends of the
  lists. Blocks of different prompts differ in size; a block's weight is a positive integer in the unit of the capacities (the
  router's: thousandths of a token), so that sums are exact. `match` ignores expired and dead holds at once, even before they
  are dropped.
- Holds are dropped in slices: an insert drops at most INSERT_HOLDS that are expired or beyond a capacity, `sweep` at most
  SWEEP_HOLDS. Only the memory bound is strict: an insert frees as much as it took.
- `purge` and `remove_replica` take O(1): the replica's whole list is set aside as dead (`tree.py`), and reclaimed in slices.

Time is an argument (seconds, any origin). A clock that goes backwards is treated as standing still.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from router.index.holds import HOLD_BYTES, NODE_BYTES, UNBOUNDED, Hold, UseList
from router.index.tree import MAX_EDGES, Tree
from router.learning.learned import Ratio
from router.types import KEY_BYTES, BlockKeys

INSERT_HOLDS: Final = 16  # a turn of a conversation adds two or three, a new holder of a path one for each edge
SWEEP_HOLDS: Final = 1000  # about a millisecond
MAX_COUNTED: Final = 4096  # holds counted by `used_since`
MAX_FORESEEN: Final = 64
MAX_PRICED: Final = 64  # holds of which `eviction_loss` knows the last use
PENDING_SHARE: Final = 16  # one sixteenth of the memory bound is for pending credits


class RadixTrie(Tree):
    """The prefix index (see the module). Replicas are named by strings and must be added before they can hold anything."""

    def __init__(self, ttl_s: float, max_bytes: int, max_edges: int = MAX_EDGES, insert_holds: int = INSERT_HOLDS) -> None:
        """max_edges: of a path. insert_holds: maximum dropped by an insert."""
        super().__init__(max_edges)
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        self.evicted = dict.fromkeys(("ttl", "capacity", "memory", "purge", "correction"), 0)  # blocks evicted, by reason
        self.now = float("-inf")
        self.lifetime: Ratio | None = None  # idle seconds of blocks when they are evicted by the capacity
        self.reserved = 0  # bytes that the last (pending) insert reserved of the share for pending credits
        self.pending_bytes = 0  # reserved by all pending credits
        self._insert_holds = insert_holds

    # -- reading

    @property
    def blocks(self) -> int:
        """Block credits summed over replicas. O(replicas)."""
        return sum(uses.blocks for uses in self._uses.values())

    @property
    def needed_bytes(self) -> int:
        """The least memory bound that would evict nothing. O(1)."""
        return self.size_bytes + self.size_bytes // (PENDING_SHARE - 1) + 1

    def held(self) -> Mapping[str, int]:
        """Blocks credited to each replica, including expired blocks that are not dropped yet. O(replicas)."""
        return {replica: uses.blocks for replica, uses in self._uses.items()}

    def held_by(self, replica: str) -> int:
        """Blocks credited to one replica. O(1)."""
        uses = self._uses.get(replica)
        return uses.blocks if uses else 0

    def weight_held_by(self, replica: str) -> int:
        """The weight of the blocks credited to one replica. O(1)."""
        uses = self._uses.get(replica)
        return uses.weight if uses else 0

    def resize(self, most: int, step: int = 0) -> bool:
        """Move the memory bound towards `most`: up at once, down to the needed bytes less `step`. True if it is still higher:
        call it again soon. O(1).
        """
        self.max_bytes = max(most, min(self.max_bytes, self.needed_bytes) - step)
        return self.max_bytes > most

    def capacity_of(self, replica: str) -> int:
        """The weight that a replica can hold, or UNBOUNDED. O(1)."""
        uses = self._uses.get(replica)
        return uses.capacity if uses else UNBOUNDED

    def pending_of(self, replica: str) -> int:
        """The weight of a replica's pending blocks. O(1)."""
        uses = self._uses.get(replica)
        return uses.pending if uses else 0

    def eviction_loss(self, replica: str, weight: int, now: float) -> float:
        """The weight that the replica would have to evict to make room for `weight` more, each block times its probability of
        reuse. O(MAX_PRICED).
        """
        uses = self._uses.get(replica)
        if uses is None or self.lifetime is None or uses.capacity == UNBOUNDED or not uses.count:
            return 0.0
        free = uses.capacity - uses.burden
        return uses.reusable(weight - free if free > 0 else weight, MAX_PRICED, now, self.lifetime.value)

    def used_since(self, replica: str, since: float, *, confirmed: bool) -> int | None:
        """Weight of a replica's blocks used after `since`, or of the confirmed ones; None if there are too many to count.
        O(holds used after it).
        """
        uses = self._uses.get(replica)
        return uses.used_since(since, MAX_COUNTED, confirmed) if uses else 0

    def next_end(self, replica: str, after: Hold | None, since: float) -> Hold | None:
        """The end of the replica's next prompt that was used after `since` and before `after`, a live hold (None: the most
        recently used prompt); see `UseList.next_end`. O(edges of a path).
        """
        uses = self._uses.get(replica)
        return uses.next_end(after, max(since, self.now - self.ttl_s)) if uses else None

    def recent_holds(self, replica: str, most: int) -> list[Hold]:
        """The replica's most recently used holds, the last one first. O(most)."""
        found: list[Hold] = []
        if uses := self._uses.get(replica):
            hold = uses.ring.staler
            while hold is not uses.ring and len(found) < most:
                found.append(hold)
                hold = hold.staler
        return found

    def lives(self, replica: str, hold: Hold) -> bool:
        """True if this is still the replica's hold on its node, and not purged. O(1)."""
        return hold.node.holders.get(replica) is hold and not self._is_dead(replica, hold)

    def match(self, keys: BlockKeys, now: float) -> dict[str, int]:
        """replica -> leading blocks of `keys` that it is believed to hold; replicas without any are omitted.

        Reads only. O(edges on the path x their holders), plus one binary search at the divergence.
        """
        alive = max(self.now, now) - self.ttl_s
        found: dict[str, int] = {}
        path, before, shared = self._walk(keys)
        start, known, all_live = 0, before + shared, not self._dead
        for node in path:
            for replica, hold in node.holders.items():
                held = hold.blocks - hold.doomed
                if held and hold.used > alive and (all_live or not self._is_dead(replica, hold)):
                    blocks = start + held
                    found[replica] = blocks if blocks < known else known
            start += node.length
        return found

    def matched(self, replicas: Collection[str], keys: BlockKeys, now: float) -> dict[str, int]:
        """`match` of these replicas only. O(edges on the path x `replicas`), plus one binary search at the divergence."""
        alive = max(self.now, now) - self.ttl_s
        found: dict[str, int] = {}
        path, before, shared = self._walk(keys)
        start, known = 0, before + shared
        for node in path:
            for replica in replicas:
                hold = node.holders.get(replica)
                if hold is None or hold.used <= alive or self._is_dead(replica, hold):
                    continue
                if held := hold.blocks - hold.doomed:
                    found[replica] = min(start + held, known)
            start += node.length
        return found

    # -- replicas

    def add_replica(self, replica: str, capacity: int | None = None) -> None:
        """Add `replica`, or change its capacity (weight; None: unbounded). Excess blocks are evicted in slices."""
        bound = UNBOUNDED if capacity is None else capacity
        if uses := self._uses.get(replica):
            uses.capacity = bound
        else:
            self._uses[replica] = UseList(Hold(self._root, 0, 0.0), bound)

    def remove_replica(self, replica: str) -> None:
        """Remove a replica and its holds. O(1). Unknown names are ignored."""
        self.purge(replica)
        if uses := self._uses.pop(replica, None):
            uses.close()

    def purge(self, replica: str) -> None:
        """Remove a replica's holds (it restarted). O(1)."""
        uses = self._uses.get(replica)
        if uses is None or not uses.count:
            return
        self.evicted["purge"] += uses.blocks
        dead = self._dead.get(replica)
        if dead is None:
            dead = self._dead[replica] = UseList(Hold(self._root, 0, 0.0))
        dead.take_over(uses)
        dead.floor = self.now
        self.now = math.nextafter(self.now, math.inf)  # later uses must be after the floor

    # -- prompts

    def insert(self, replica: str, keys: BlockKeys, now: float, *, weight: int = 1, confirmed: bool = True) -> float | None:
        """Credit `replica` with the blocks of `keys`, used now, as far as it can hold them; unless confirmed, as pending.

        weight: of one block, unless the prompt continues a path, whose weight then counts. Returns the idle seconds of the
        deepest block that it held already; None if it held none. O(edges on the path), plus O(1) amortised for each dropped
        hold. Unknown replicas are ignored (they left while their request was running). Sets `credited` and `reserved`.
        """
        self.credited = self.reserved = 0
        self.tail = None
        uses = self._uses.get(replica)
        if uses is None:
            return None
        self.now = now = max(self.now, now)
        blocks, capacity = (
            len(keys) // KEY_BYTES,
            uses.capacity,
        )  # no product of a capacity: large integers are slow
        if blocks * self._heaviest > capacity or blocks * weight > capacity:
            keys = keys[: capacity // self.weight_of(keys, weight) * KEY_BYTES]
        used: float | None = None
        if confirmed:
            if keys:
                used = self._credit(replica, uses, keys, weight, now, now - self.ttl_s, True)
            self._enforce(replica, uses)
        else:
            if keys and self._reserve(keys):
                used = self._credit(replica, uses, keys, weight, now, now - self.ttl_s, False)
            # Dead holds first: a live hold must not be dropped while a dead one of its replica is below it.
            left = self._reclaim(self._insert_holds) if self._dead else self._insert_holds
            self._expire(replica, uses, left)
            self._foresee(uses)
        return None if used is None else now - used

    def confirm(self, replica: str, keys: BlockKeys, now: float, tail: Hold | None = None, *, weight: int = 1) -> None:
        """The replica has computed the prompt: confirm its pending credit, or credit it again if it was evicted.

        tail: of its insert, which saves a walk. weight: as in `insert`. O(edges on the path), plus O(1) amortised for each
        dropped hold.
        """
        uses = self._uses.get(replica)
        if uses is None:
            return
        self.now = now = max(self.now, now)
        blocks = self._end_in(tail, replica, keys) if tail is not None else 0
        if not blocks:
            path, start, shared = self._walk(keys)
            tail = path[-1].holders.get(replica) if path else None
            blocks = shared if (start + shared) * KEY_BYTES == len(keys) else 0
        gone = tail is None or not 0 < blocks <= tail.blocks or tail.used <= now - self.ttl_s
        if tail is None or gone or (self._dead and self._is_dead(replica, tail)):
            self.insert(replica, keys, now, weight=weight)
            return
        hold = tail
        while hold.confirmed < blocks:
            uses.confirm(hold, blocks)
            parent = hold.node.parent
            if parent is None or parent is self._root:
                break
            hold, blocks = parent.holders[replica], parent.length
        self._enforce(replica, uses)

    def _end_in(self, tail: Hold, replica: str, keys: BlockKeys) -> int:
        """Number of blocks of the prompt on the tail's edge; 0 if the prompt does not end there now. O(edges above)."""
        node = tail.node
        if node.holders.get(replica) is not tail:
            return 0
        end, parent = len(keys), node.parent
        while parent is not None:
            end -= len(parent.edge)
            parent = parent.parent
        # The last key stands for all keys before it.
        return end // KEY_BYTES if end > 0 and node.edge[end - KEY_BYTES : end] == keys[-KEY_BYTES:] else 0

    def take_back(self, replica: str, keys: BlockKeys, keep: int = 0, *, confirmed: bool = False) -> None:
        """The replica did not compute the prompt beyond its first `keep` blocks: remove the pending credit there, up to blocks
        that another prompt extends. confirmed: the confirmed credit, too.

        It also stops at blocks with an expired extension that is not dropped yet. O(edges on the path + MAX_CHILDREN for each
        of them).
        """
        uses = self._uses.get(replica)
        if uses is None or not (uses.pending or confirmed):
            return
        path, start, shared = self._walk(keys)
        stale = self.now - self.ttl_s
        # The lengths of the edges before any of them is merged.
        steps = [(node, node.length) for node in path[:-1]] + [(node, shared) for node in path[-1:]]
        for number in range(len(steps) - 1, -1, -1):
            node, blocks = steps[number]
            hold = node.holders.get(replica)
            if hold is not None and not self._is_dead(replica, hold):
                least = max(0, keep - start)
                if least < hold.confirmed and hold.used > stale and not confirmed:
                    least = hold.confirmed
                if least >= hold.blocks or hold.blocks > blocks or self._held_below(node, replica):
                    break
                self.evicted["correction"] += hold.blocks - least
                self._drop(replica, uses, hold, least)
                if least:
                    break
            if number:
                start -= steps[number - 1][1]
        self._foresee(uses)

    def back(self, replica: str, weight: int) -> None:
        """Pending credits of the replica hide other blocks up to this weight. O(1)."""
        if uses := self._uses.get(replica):
            uses.backed = weight

    def weigh(self, replica: str, keys: BlockKeys, weight: int) -> None:
        """An engine has counted the prompt: set the weight of its blocks, unless they share their path with other prompts or
        replicas. O(edges on the path) after a walk.
        """
        path, start, shared = self._walk(keys)
        if replica not in self._uses or not path or (start + shared) * KEY_BYTES != len(keys) or path[-1].length != shared:
            return
        below = 0  # children of the node: its path goes on there, if anywhere
        for node in reversed(path):
            if len(node.children) != below or len(node.holders) > 1 or replica not in node.holders:
                return
            below = 1
        for node in path:
            hold = node.holders[replica]
            self._list_of(replica, hold).weigh(hold, node.weight - weight)
            node.weight = weight
        self._heaviest = max(self._heaviest, weight)

    # -- bounds

    def sweep(self, now: float, holds: int = SWEEP_HOLDS) -> bool:
        """Drop at most `holds` holds that are dead, expired or beyond a capacity. True if some may be left.

        O(replicas + holds dropped). For once a second, and again soon while it returns True.
        """
        self.now = max(self.now, now)
        left = self._reclaim(holds)
        for replica, uses in self._uses.items():
            left = self._expire(replica, uses, left)
            left = self._enforce_capacity(replica, uses, left)
            self._foresee(uses)
        self._enforce_memory()
        return left <= 0

    def _reserve(self, keys: BlockKeys) -> bool:
        """Reserve room for a pending credit in its share: a leaf and a split at most, and a hold on each node. False:
        no room.
        """
        path, start, shared = self._walk(keys)
        holds = len(path) + 2 + (len(path[-1].holders) if path else 0)
        growth = len(keys) - (start + shared) * KEY_BYTES + 2 * NODE_BYTES + holds * HOLD_BYTES
        if self.pending_bytes + growth > self.max_bytes // PENDING_SHARE:
            return False
        self.reserved = growth
        self.pending_bytes += growth
        return True

    def _enforce(self, replica: str, uses: UseList) -> None:
        left = self._reclaim(self._insert_holds) if self._dead else self._insert_holds
        left = self._expire(replica, uses, left)
        self._enforce_capacity(replica, uses, left)
        self._enforce_memory()
        self._foresee(uses)

    def _foresee(self, uses: UseList) -> None:
        """Exclude from matches the blocks to be evicted when the backed pending credits are confirmed: half of the capacity at
        most.
        """
        capacity = uses.capacity
        if uses.weight > capacity and (excess := uses.burden - capacity) > 0:
            uses.foresee(excess, capacity // 2, MAX_FORESEEN)
        elif uses.dooms:
            uses.foresee(0, 0, MAX_FORESEEN)

    def _reclaim(self, left: int) -> int:
        """Free dead holds, at most `left` of them. Returns the number that may still be dropped."""
        for replica in list(self._dead) if self._dead else ():
            dead = self._dead[replica]
            while left > 0 and (hold := dead.stalest):
                self._drop(replica, dead, hold, 0)
                left -= 1
            if not dead.count:
                del self._dead[replica]
                dead.close()
        return left

    def _expire(self, replica: str, uses: UseList, left: int) -> int:
        stale = self.now - self.ttl_s
        while left > 0 and (hold := uses.stalest) and hold.used <= stale:
            self.evicted["ttl"] += hold.blocks
            self._drop(replica, uses, hold, 0)
            left -= 1
        return left

    def _enforce_capacity(self, replica: str, uses: UseList, left: int) -> int:
        """Evict beyond the capacity, including pending credits at the stale end; these are credited again if the end of the
        answer confirms them.
        """
        capacity = uses.capacity
        while left > 0 and uses.weight - uses.pending > capacity and (hold := uses.stalest):
            weight = hold.node.weight
            evicted = min(hold.confirmed, -((capacity + uses.pending - uses.weight) // weight))
            keep = hold.confirmed - evicted
            if evicted:
                self._learn_lifetime(self.now - hold.used, evicted * weight, capacity)
            self.evicted["capacity"] += hold.blocks - keep
            self._drop(replica, uses, hold, keep)
            left -= 1
        return left

    def _learn_lifetime(self, idle_s: float, weight: int, capacity: int) -> None:
        """Learn from an eviction. Earlier evidence halves with every eviction of a whole cache."""
        if self.lifetime is None:
            self.lifetime = Ratio(max(idle_s, 1.0), weight, max(capacity, 1))
        else:
            self.lifetime.learn(max(idle_s, 1e-3) * weight, weight, weight)

    def restore_lifetime(self, sums: tuple[float, float], half_life: float) -> None:
        """Take over the learned lifetime of another index, unless this one has evicted blocks."""
        if self.lifetime is None:
            self.lifetime = Ratio(1.0, 1.0, half_life)
            self.lifetime.restore(sums)

    def _enforce_memory(self) -> None:
        """Drop dead holds, then the least recently used of all replicas, until the share for pending credits is free.

        O(replicas) for each hold dropped.
        """
        bound = self.max_bytes - self.max_bytes // PENDING_SHARE + self.pending_bytes
        while self.size_bytes > bound and self._holds:
            if self._dead:
                self._reclaim(1)
                continue
            stalest = (
                (hold.used, replica, uses, hold) for replica, uses in self._uses.items() if (hold := uses.stalest) is not None
            )
            _, replica, uses, hold = min(stalest, key=lambda item: item[0])
            self.evicted["memory"] += hold.blocks
            self._drop(replica, uses, hold, 0)

    # -- invariants

    def check(self) -> None:
        """Raises AssertionError if an invariant of this file or of tree.py is broken. O(everything)."""
        self._check_shape()
        for uses in self._uses.values():
            assert uses.ring.staler.used <= self.now or not uses.count, "used in the future"
        for dead in self._dead.values():
            assert dead.floor < self.now

    def __repr__(self) -> str:
        return f"<RadixTrie {self._nodes} nodes, {self.blocks} blocks on {len(self._uses)} replicas, {self.size_bytes} bytes>"
