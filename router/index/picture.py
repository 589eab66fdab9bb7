"""A picture of the tree: a node, its holders, and the most recently used of its children, level by level.

Reads only. A node is identified by its way: the first keys of the edges from the root. A way stays valid while nodes below it
come and go; if an edge on it was split or merged, `find` returns the deepest node that is still on it.

Everything is bounded: a picture has `most` nodes. Per node, the newest LOOKED_AT children are examined, and LOOKED_AT_HOLDS of
their holders; of a root with more children, the last used ones. A picture of a large tree still takes tens of milliseconds, so
it can be drawn in `steps`, one for each node whose children are examined. The tree may change between steps: a removed node is
drawn as it was, without holders.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

from router.index.holds import Node
from router.index.trie import RadixTrie
from router.types import KEY_BYTES, TOKEN_WEIGHT, BlockKeys

LOOKED_AT: Final = 2048  # children of a node
LOOKED_AT_HOLDS: Final = 8192  # of these children together, and at least one child's
MAX_HOLDERS: Final = 32  # of a node in the picture; the replicas that hold most of it


class Holder(NamedTuple):
    """blocks: leading blocks of the node's edge that the replica holds. pending: of these, blocks of requests in flight.
    idle_s: since its last use.
    """

    replica: str
    blocks: int
    pending: int
    idle_s: float


class DrawnNode(NamedTuple):
    """A node. way: the first keys of the edges that lead to it. blocks, tokens: of its edge. depth_tokens: of all edges above.
    holders: the largest first. further: number of holders beyond MAX_HOLDERS. idle_s: since the last use, None without a
    holder. children: number of all children. shown: the most recently used children, none below the picture's depth.
    """

    way: Sequence[BlockKeys]
    blocks: int
    tokens: int
    depth_tokens: int
    holders: Sequence[Holder]
    further: int
    idle_s: float | None
    children: int
    shown: Sequence[DrawnNode]


class Picture:
    """Draws a picture of `trie` at one moment (see the module). A new object for each question."""

    def __init__(self, trie: RadixTrie, now: float, depth: int, children: int, most: int) -> None:
        """depth: levels below the requested node. children: maximum shown of each node. most: maximum of nodes."""
        self._trie = trie
        self._now = max(now, trie.now)
        self._depth = depth
        self._children = children
        self._left = most

    def draw(self, way: Sequence[BlockKeys]) -> DrawnNode:
        """The node at the end of the way, or the deepest existing node on it."""
        return next(drawn for drawn in self.steps(way) if drawn is not None)

    def steps(self, way: Sequence[BlockKeys]) -> Iterator[DrawnNode | None]:
        """`draw` in steps: the last item is the node. Each O(LOOKED_AT + LOOKED_AT_HOLDS + holders of children shown)."""
        found, node, tokens = self.find(way)
        yield (yield from self._draw(found, node, tokens, self._depth))

    def find(self, way: Sequence[BlockKeys]) -> tuple[list[BlockKeys], Node, int]:
        """(the existing part of the way, its last node, the tokens of the edges above that node). O(edges)."""
        node, tokens = self._trie.root, 0
        found: list[BlockKeys] = []
        for first in way:
            child = node.children.get(first)
            if child is None:
                break
            tokens += node.length * node.weight // TOKEN_WEIGHT
            found.append(first)
            node = child
        return found, node, tokens

    def _draw(self, way: list[BlockKeys], node: Node, above: int, depth: int) -> Generator[None, None, DrawnNode]:
        self._left -= 1
        tokens = node.length * node.weight // TOKEN_WEIGHT
        holders = self._holders(node)
        shown: list[DrawnNode] = []
        if depth > 0 and node.children:
            recent = self._recent(node)
            yield
            for child in recent:
                if self._left <= 0:
                    break
                shown.append((yield from self._draw([*way, child.edge[:KEY_BYTES]], child, above + tokens, depth - 1)))
        idle = min([holder.idle_s for holder in holders], default=None)
        few = holders[:MAX_HOLDERS]
        return DrawnNode(way, node.length, tokens, above, few, len(holders) - len(few), idle, len(node.children), shown)

    def _holders(self, node: Node) -> list[Holder]:
        """The live holders that have not expired."""
        trie, stale = self._trie, self._now - self._trie.ttl_s
        found = [
            Holder(replica, hold.blocks, hold.blocks - hold.confirmed, max(0.0, self._now - hold.used))
            for replica, hold in node.holders.items()
            if hold.used > stale and trie.lives(replica, hold)
        ]
        found.sort(key=lambda holder: (-holder.blocks, holder.idle_s, holder.replica))
        return found

    def _recent(self, node: Node) -> list[Node]:
        """The most recently used children; below the root, of the newest ones. O(LOOKED_AT + LOOKED_AT_HOLDS)."""
        if node is self._trie.root and len(node.children) > LOOKED_AT:
            looked = self._heads()
        else:
            looked, holds = [], 0
            for child in reversed(node.children.values()):  # the newest
                looked.append(child)
                holds += len(child.holders)
                if len(looked) == LOOKED_AT or holds >= LOOKED_AT_HOLDS:
                    break
        used = [(max([hold.used for hold in child.holders.values()], default=0.0), child) for child in looked]
        used.sort(key=lambda each: -each[0])
        return [child for _, child in used[: self._children]]

    def _heads(self) -> list[Node]:
        """The last used children of the root: from each replica's list of uses, LOOKED_AT holds in all."""
        trie, heads = self._trie, dict[bytes, Node]()
        replicas = list(trie.held())
        for replica in replicas:
            for hold in trie.recent_holds(replica, max(1, LOOKED_AT // len(replicas))):
                if hold.node.parent is trie.root:
                    heads[hold.node.edge[:KEY_BYTES]] = hold.node
        return list(heads.values())
