"""The parts of the radix tree: its nodes, a replica's hold on a node's edge, and a replica's holds in order of use.

They only keep their own links straight; `trie.py` says what they mean together.

There are millions of them, and a garbage collection that walks them all stops every stream for as long. So compiled code
keeps them out of its sight (`acyclic`): what the tree drops has to be free of cycles, and is freed at once.
"""

from __future__ import annotations

from typing import Final

from router.native import mypyc_attr
from router.types import KEY_BYTES, BlockKeys

# Estimated bytes of CPython 3.11 objects, checked against tracemalloc by a test. A node: its object, its edge's header, its
# holders' dictionary, its key and slot in the parent's children.
NODE_BYTES: Final = 480
HOLD_BYTES: Final = 112


@mypyc_attr(acyclic=True)
class Hold:
    """A replica's claim on the first `blocks` blocks of a node's edge; a link of that replica's use list."""

    __slots__ = ("blocks", "fresher", "node", "staler", "used")
    __deletable__ = ("fresher", "staler")

    node: Node
    staler: Hold
    fresher: Hold

    def __init__(self, node: Node, blocks: int, used: float) -> None:
        self.node = node
        self.blocks = blocks
        self.used = used

    def __repr__(self) -> str:
        return f"<Hold {self.blocks}/{self.node.length} used {self.used}>"


@mypyc_attr(acyclic=True)
class Node:
    """The end of an edge. `children` are keyed by the first key of their edges; leaves share one dictionary of none."""

    __slots__ = ("children", "edge", "holders", "parent")

    def __init__(self, edge: BlockKeys, parent: Node | None, children: dict[bytes, Node]) -> None:
        self.edge = edge
        self.parent = parent
        self.children = children
        self.holders: dict[str, Hold] = {}

    @property
    def length(self) -> int:
        return len(self.edge) // KEY_BYTES

    def __repr__(self) -> str:
        held = ", ".join(f"{replica}: {hold.blocks}" for replica, hold in self.holders.items())
        return f"<Node {self.length} blocks, {len(self.children)} children, {{{held}}}>"


class UseList:
    """One replica's holds, stale to fresh, as a ring around a sentinel. All operations O(1) but `used_since`."""

    __slots__ = ("blocks", "capacity", "count", "ring")

    def __init__(self, ring: Hold, capacity: int | None) -> None:
        self.ring = ring
        ring.staler = ring.fresher = ring
        self.capacity = capacity  # blocks; None: unbounded
        self.blocks = 0
        self.count = 0

    @property
    def stalest(self) -> Hold | None:
        return self.ring.fresher if self.count else None

    def used_since(self, since: float) -> int:
        """Blocks of the holds that were used after `since`. O(those holds)."""
        blocks, hold = 0, self.ring.staler
        while hold is not self.ring and hold.used > since:
            blocks += hold.blocks
            hold = hold.staler
        return blocks

    def link_after(self, hold: Hold, left: Hold) -> None:
        """Put `hold` on the fresh side of `left`."""
        hold.staler, hold.fresher = left, left.fresher
        left.fresher.staler = hold
        left.fresher = hold
        self.count += 1

    def unlink(self, hold: Hold) -> None:
        hold.staler.fresher = hold.fresher
        hold.fresher.staler = hold.staler
        # A chain of dropped holds that keep each other would be freed one inside the other, as deep as it is long.
        del hold.staler, hold.fresher
        self.count -= 1

    def close(self) -> None:
        """The replica has left, and nothing is in its list."""
        del self.ring.staler, self.ring.fresher

    def use(self, node: Node, replica: str, blocks: int, now: float) -> float | None:
        """The replica, whose list this is, uses the first `blocks` blocks of a node's edge: never less than it holds of it.

        Returns when it last did; None if it held nothing of it.
        """
        used: float | None = None
        hold = node.holders.get(replica)
        if hold is None:
            hold = node.holders[replica] = Hold(node, 0, now)
            self.link_after(hold, self.ring.staler)
        else:
            used = hold.used
            self.freshen(hold)
        hold.used = now
        self.blocks += blocks - hold.blocks
        hold.blocks = blocks
        return used

    def freshen(self, hold: Hold) -> None:
        ring = self.ring
        last = ring.staler
        if last is not hold:
            hold.staler.fresher = hold.fresher
            hold.fresher.staler = hold.staler
            hold.staler, hold.fresher = last, ring
            last.fresher = ring.staler = hold
