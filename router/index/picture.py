"""The tree as a picture of it shows it: a node, its holders, and the most recently used of its children, level by level.

Reads only. A node is named by the way to it: the first keys of the edges from the root. The way stays right while nodes below
it come and go; where an edge on it was split or merged meanwhile, `find` returns the deepest node that is still on it.

Everything is bounded: a picture has `most` nodes. Of a node LOOKED_AT children are looked at, the newest, and LOOKED_AT_HOLDS
of their holders; of the root those that were used last where they are more. A picture of a large tree takes tens of
milliseconds all the same, so it can be drawn in `steps`, one for each node whose children are looked at, between which the tree
may change: a node that was removed meanwhile is drawn as it was left, with nobody who holds it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

from router.index.holds import Node
from router.index.trie import RadixTrie
from router.types import KEY_BYTES, TOKEN_WEIGHT, BlockKeys

LOOKED_AT: Final = 2048  # children of a node
LOOKED_AT_HOLDS: Final = 8192  # of these children together, and at least one child's
MAX_HOLDERS: Final = 32  # of a node, in the picture; those that hold most of it


class Holder(NamedTuple):
    """blocks: of the node's edge that the replica holds, from its beginning; pending: of these, of requests in flight. idle_s:
    since its last use.
    """

    replica: str
    blocks: int
    pending: int
    idle_s: float


class DrawnNode(NamedTuple):
    """A node. way: the first keys of the edges that lead to it. blocks, tokens: of its edge; depth_tokens: of all edges above.
    holders: those that hold most of it first; further: holders beyond MAX_HOLDERS. idle_s: since anybody used it, None:
    nobody holds it any more. children: how many it has. shown: the most recently used ones, none below the picture's depth.
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
    """See the top of this file. A picture of `trie` at a time; made anew for each question."""

    def __init__(self, trie: RadixTrie, now: float, depth: int, children: int, most: int) -> None:
        """depth: levels below the node that is asked for. children: shown of each node. most: nodes in all."""
        self._trie = trie
        self._now = max(now, trie.now)
        self._depth = depth
        self._children = children
        self._left = most

    def draw(self, way: Sequence[BlockKeys]) -> DrawnNode:
        """The node at the end of the way, or the deepest that there is on it."""
        return next(drawn for drawn in self.steps(way) if drawn is not None)

    def steps(self, way: Sequence[BlockKeys]) -> Iterator[DrawnNode | None]:
        """The same in steps: the last is the node. Each O(LOOKED_AT + LOOKED_AT_HOLDS + holders of children shown)."""
        found, node, tokens = self.find(way)
        yield (yield from self._draw(found, node, tokens, self._depth))

    def find(self, way: Sequence[BlockKeys]) -> tuple[list[BlockKeys], Node, int]:
        """(the way as far as it leads, the node there, the tokens of the edges above that node). O(edges)."""
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
        """Those that live and have not expired."""
        trie, stale = self._trie, self._now - self._trie.ttl_s
        found = [
            Holder(replica, hold.blocks, hold.blocks - hold.confirmed, max(0.0, self._now - hold.used))
            for replica, hold in node.holders.items()
            if hold.used > stale and trie.lives(replica, hold)
        ]
        found.sort(key=lambda holder: (-holder.blocks, holder.idle_s, holder.replica))
        return found

    def _recent(self, node: Node) -> list[Node]:
        """The most recently used children; below the root, of the newest. O(LOOKED_AT + LOOKED_AT_HOLDS)."""
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
        """Children of the root that were used last: by each replica's list of uses, LOOKED_AT holds in all."""
        trie, heads = self._trie, dict[bytes, Node]()
        replicas = list(trie.held())
        for replica in replicas:
            for hold in trie.recent_holds(replica, max(1, LOOKED_AT // len(replicas))):
                if hold.node.parent is trie.root:
                    heads[hold.node.edge[:KEY_BYTES]] = hold.node
        return list(heads.values())
