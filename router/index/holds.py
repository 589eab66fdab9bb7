"""The parts of the radix tree: its nodes, a replica's hold on a node's edge, and a replica's holds in order of use.

They maintain only their own links; the invariants between them are in `tree.py` and `trie.py`.

There are millions of them, and a garbage collection that visits them all would pause every stream. So compiled code excludes
them from it (`acyclic`): objects that the tree drops must be free of cycles, and are freed at once.
"""

from __future__ import annotations

import math
from typing import Final

from router.native import mypyc_attr
from router.types import KEY_BYTES, BlockKeys

# Estimated bytes of CPython 3.11 objects, checked against tracemalloc by a test. A node: its object, its edge's header, its
# holders' dictionary, its key and slot in the parent's children.
NODE_BYTES: Final = 496
HOLD_BYTES: Final = 128

UNBOUNDED: Final = 1 << 60  # a capacity that is never reached; an optional int would be slower in compiled code


def reuse_chance(idle_s: float, lifetime_s: float) -> float:
    """The probability of reuse of a block that was idle for idle_s, if blocks are evicted after lifetime_s."""
    return math.exp(-idle_s / lifetime_s) if idle_s > 0 else 1.0


@mypyc_attr(acyclic=True)
class Hold:
    """A replica's hold on the first `blocks` blocks of a node's edge; a link of that replica's use list.

    confirmed: leading blocks confirmed by an answer; the others are pending credits of requests in flight. doomed: number of
    its last blocks that will be evicted once pending credits are confirmed.
    """

    __slots__ = ("blocks", "confirmed", "doomed", "fresher", "node", "staler", "used")
    __deletable__ = ("fresher", "staler")

    node: Node
    staler: Hold
    fresher: Hold

    def __init__(self, node: Node, blocks: int, used: float) -> None:
        self.node = node
        self.blocks = blocks
        self.confirmed = 0
        self.doomed = 0
        self.used = used

    def __repr__(self) -> str:
        return f"<Hold {self.blocks}/{self.node.length} ({self.confirmed} confirmed) used {self.used}>"


@mypyc_attr(acyclic=True)
class Node:
    """The end of an edge. `children` are keyed by the first key of their edges; leaves share one empty dictionary.

    height: at least the number of edges of the longest path below; 0 for a leaf. weight: of each block of the edge.
    """

    __slots__ = ("children", "edge", "height", "holders", "parent", "weight")

    def __init__(self, edge: BlockKeys, parent: Node | None, children: dict[bytes, Node], weight: int) -> None:
        self.edge = edge
        self.parent = parent
        self.children = children
        self.height = 0
        self.weight = weight
        self.holders: dict[str, Hold] = {}

    @property
    def length(self) -> int:
        return len(self.edge) // KEY_BYTES

    def __repr__(self) -> str:
        held = ", ".join(f"{replica}: {hold.blocks}" for replica, hold in self.holders.items())
        return f"<Node {self.length} blocks, {len(self.children)} children, {{{held}}}>"


class UseList:
    """One replica's holds in LRU order (stale to fresh), a ring around a sentinel. Operations are O(1) unless they say
    otherwise.

    blocks: of all holds. weight: of these blocks together. pending: weight of the unconfirmed blocks. backed: weight of pending
    blocks that hide others already. count: holds. capacity: the weight that the replica can hold, or UNBOUNDED. floor: for
    a list of purged holds, the time of the last purge: all its holds were last used before, and every live hold of the replica
    after it. dooms: some holds are doomed.
    """

    __slots__ = ("backed", "blocks", "capacity", "count", "dooms", "floor", "pending", "ring", "weight")

    def __init__(self, ring: Hold, capacity: int = UNBOUNDED) -> None:
        self.ring = ring
        ring.staler = ring.fresher = ring
        self.capacity = capacity
        self.floor = float("-inf")
        self.dooms = False
        self.blocks = 0
        self.weight = 0
        self.pending = 0
        self.backed = 0
        self.count = 0

    @property
    def burden(self) -> int:
        """The weight that counts against the capacity: of the confirmed blocks, and of the backed pending ones."""
        return self.weight - self.pending + (self.backed if self.backed < self.pending else self.pending)

    @property
    def stalest(self) -> Hold | None:
        return self.ring.fresher if self.count else None

    def foresee(self, excess: int, most: int, most_holds: int) -> None:
        """Mark the stalest blocks as doomed, until they weigh at least `excess` together, but not more than `most`.

        Marks blocks of most_holds holds at most, and unmarks all others. O(those holds, and the previously doomed ones).
        """
        ring = self.ring
        hold = ring.fresher
        self.dooms = more = excess > 0
        while more and hold is not ring and most_holds:
            blocks, weight = hold.blocks, hold.node.weight
            held = blocks * weight
            if held <= most and held - weight < excess:
                hold.doomed = blocks
                excess -= held
                most -= held
                most_holds -= 1
            else:  # at least one of its blocks survives
                doomed, at_most = -(-excess // weight), most // weight
                # Below zero if the last block of the previous hold weighs more than the rest of `excess`.
                hold.doomed = 0 if doomed < 0 else doomed if doomed < at_most else at_most
                more = False
            hold = hold.fresher
        while hold is not ring and hold.doomed:
            hold.doomed = 0
            hold = hold.fresher

    def reusable(self, excess: int, most_holds: int, now: float, lifetime_s: float) -> float:
        """The weight of the stalest blocks that together weigh `excess`, without the doomed ones, each times its probability of
        reuse (`reuse_chance`). Beyond most_holds holds all blocks count like the last one. O(most_holds + doomed holds).
        """
        hold, used, chance, found = self.ring.fresher, -1.0, 1.0, 0.0
        while excess > 0 and most_holds and hold is not self.ring:
            weight = (hold.blocks - hold.doomed) * hold.node.weight
            if weight:
                if hold.used != used:
                    used, chance = hold.used, reuse_chance(now - hold.used, lifetime_s)
                found += chance * (weight if weight < excess else excess)
                excess -= weight
                most_holds -= 1
            hold = hold.fresher
        return found + chance * excess if excess > 0 else found

    def used_since(self, since: float, most_holds: int, confirmed: bool) -> int | None:
        """Weight of the holds used after `since`, or of their confirmed blocks; None if there are more than most_holds of them.
        O(those holds).
        """
        weight, holds, hold = 0, 0, self.ring.staler
        while hold is not self.ring and hold.used > since:
            if holds == most_holds:
                return None
            holds += 1
            weight += (hold.confirmed if confirmed else hold.blocks) * hold.node.weight
            hold = hold.staler
        return weight

    def next_end(self, after: Hold | None, since: float) -> Hold | None:
        """The next hold at which a use ended, on the stale side of `after` (None: the first of all); None if it was not used
        after `since`. O(edges of a path).

        A use moves the holds of its path to the fresh end, deepest first; a later use takes some of the upper ones away. So a
        use ended at a hold without a hold of the same time and path on its stale side.
        """
        ring = self.ring
        hold = ring.staler if after is None else after.staler
        while hold is not ring and hold.used > since:
            staler = hold.staler
            if staler is ring or staler.used != hold.used or staler.node.parent is not hold.node:
                return hold
            hold = staler
        return None

    def link_after(self, hold: Hold, left: Hold) -> None:
        """Insert `hold` on the fresh side of `left`."""
        hold.staler, hold.fresher = left, left.fresher
        left.fresher.staler = hold
        left.fresher = hold
        self.count += 1

    def unlink(self, hold: Hold) -> None:
        hold.staler.fresher = hold.fresher
        hold.fresher.staler = hold.staler
        # Otherwise a chain of dropped holds would be freed recursively, to the depth of its length.
        del hold.staler, hold.fresher
        self.count -= 1

    def close(self) -> None:
        """Free an empty list's ring."""
        del self.ring.staler, self.ring.fresher

    def use(self, node: Node, replica: str, blocks: int, now: float, stale: float, confirmed: bool) -> float | None:
        """The list's replica uses the first `blocks` blocks of a node's edge: at least as many as it holds.

        stale: holds last used by then have expired, and none of their blocks counts as confirmed. confirmed: all used blocks
        are confirmed, else only the previously confirmed ones. Returns the last use of the hold; None if there was no hold.
        """
        used: float | None = None
        hold = node.holders.get(replica)
        if hold is None:
            hold = node.holders[replica] = Hold(node, 0, now)
            self.link_after(hold, self.ring.staler)
        else:
            used = hold.used
            if used <= stale:
                self.pending += hold.confirmed * node.weight
                hold.confirmed = 0
            self.freshen(hold)
            hold.doomed = 0
        hold.used = now
        if hold.blocks != blocks:
            more = (blocks - hold.blocks) * node.weight
            self.weight += more
            self.pending += more
            self.blocks += blocks - hold.blocks
            hold.blocks = blocks
        if confirmed:
            self.confirm(hold, blocks)
        return used

    def confirm(self, hold: Hold, blocks: int) -> None:
        """The first `blocks` blocks of the hold are confirmed."""
        if hold.confirmed < blocks:
            self.pending -= (blocks - hold.confirmed) * hold.node.weight
            hold.confirmed = blocks

    def freshen(self, hold: Hold) -> None:
        ring = self.ring
        last = ring.staler
        if last is not hold:
            hold.staler.fresher = hold.fresher
            hold.fresher.staler = hold.staler
            hold.staler, hold.fresher = last, ring
            last.fresher = ring.staler = hold

    def weigh(self, hold: Hold, less: int) -> None:
        """The hold's blocks will weigh less, each by `less` (or more, if negative)."""
        self.weight -= hold.blocks * less
        self.pending -= (hold.blocks - hold.confirmed) * less

    def shorten(self, hold: Hold, keep: int) -> None:
        """Keep only the first `keep` blocks of the hold."""
        gone, weight = hold.blocks - keep, hold.node.weight
        confirmed = hold.confirmed if hold.confirmed < keep else keep
        self.pending -= (gone - hold.confirmed + confirmed) * weight
        self.weight -= gone * weight
        self.blocks -= gone
        hold.blocks, hold.confirmed = keep, confirmed
        if hold.doomed:
            hold.doomed = max(0, hold.doomed - gone)

    def take_over(self, other: UseList) -> None:
        """Move all holds of `other` (not empty) to the fresh end of this list."""
        ring, theirs = self.ring, other.ring
        first, last, tail = theirs.fresher, theirs.staler, ring.staler
        tail.fresher, first.staler = first, tail
        last.fresher, ring.staler = ring, last
        theirs.staler = theirs.fresher = theirs
        self.blocks += other.blocks
        self.weight += other.weight
        self.pending += other.pending
        self.count += other.count
        other.blocks = other.weight = other.pending = other.count = 0
        other.dooms = False
