"""The shape of the prefix index: a path-compressed radix tree over block keys, with the replicas' holds on its edges.

An edge is a run of keys (bytes, KEY_BYTES each); a node is the end of one edge. Keys are chained, so edges compare as plain
bytes. A `Hold`: a replica holds the first `blocks` blocks of a node's edge; holds are prefix-closed:

    root ── "abc" (r1: 3, r2: 2) ──┬── "de" (r1: 2)          r1 holds abc, abcde, abcx; r2 holds ab.
                                   └── "x"  (r1: 1)

- a replica that holds any block of a node holds every block of the node's ancestors;
- a hold that stops inside an edge has no hold of that replica below it, so r2 above costs no split;
- every edge ends where its longest hold ends, and every leaf has a hold: no block is stored without a holder;
- all blocks below a child of the root weigh the same: keys are chained, so that prompts that share a block have been cut into
  blocks of one size by one model. The first credit sets a block's weight (a model's tokens are an estimate);
- a path has at most max_edges edges, because every decision on it visits all of them.

Each replica's holds form a list in order of last use. One `_credit` moves the holds of its path to the fresh end, deepest
first, so that the stale end is always a tail: dropping holds from there never breaks prefix closure. An edge is split at the
point where prompts diverge or use diverges; a node with one child is merged with it once their uses are equal again. A split
that would make a path too long is not made: the prompt is credited only up to that point (`credited`).

Purged holds are dead: they stay on their nodes, in a list of their own (`_dead`), until they are reclaimed one by one. A hold
is dead if it was last used before the floor of that list. A replica's dead hold has no live one of that replica below it.

`trie.py` decides which holds are dropped, and when.
"""

from __future__ import annotations

from typing import Final

from router.index.blocks import shared_blocks
from router.index.holds import HOLD_BYTES, NODE_BYTES, Hold, Node, UseList
from router.types import KEY_BYTES, BlockKeys

MAX_EDGES: Final = 256
FEW_CHILDREN: Final = 4  # a node with at most this many updates its height when the tree below shrinks
MAX_CHILDREN: Final = 256  # of a node, to be searched for a replica's holds


class Tree:
    """The prefix tree (see the module)."""

    def __init__(self, max_edges: int) -> None:
        self.max_edges = max_edges
        self.credited = 0  # leading blocks that the last `_credit` credited
        self.tail: Hold | None = None  # the deepest hold used by the last `_credit`
        self._root = Node(b"", None, {}, 0)
        self._none: dict[bytes, Node] = {}  # children of all leaves; always empty
        self._uses: dict[str, UseList] = {}
        self._dead: dict[str, UseList] = {}
        self._nodes = 0
        self._edge_bytes = 0
        self._heaviest = 0  # maximum weight of a block in the tree
        self._holds = 0
        # The last walk: a request is matched and then credited, mostly with no change to the tree in between.
        self._no_path: list[Node] = []
        self._walked: BlockKeys = b""
        self._path = self._no_path
        self._before = 0
        self._shared = 0

    @property
    def root(self) -> Node:
        """The root, for readers of the tree."""
        return self._root

    @property
    def size_bytes(self) -> int:
        """Estimated memory. O(1)."""
        return self._nodes * NODE_BYTES + self._edge_bytes + self._holds * HOLD_BYTES

    def weight_of(self, keys: BlockKeys, otherwise: int) -> int:
        """The weight of a block of this prompt: that of its path in the tree; `otherwise` without one. O(edges on the path), or
        O(1) after another call with the same prompt.
        """
        path, _, _ = self._walk(keys)
        return path[0].weight if path else otherwise

    def _walk(self, keys: BlockKeys) -> tuple[list[Node], int, int]:
        """(nodes, root excluded; blocks before the last one's edge; leading blocks of its edge that `keys` shares).

        `keys` shares all of the other edges, and at least one block of the last; both numbers are 0 without nodes. The caller
        must not change the list.
        """
        if keys is self._walked:
            return self._path, self._before, self._shared
        path: list[Node] = []
        children, begin, at, end = self._root.children, 0, 0, len(keys)
        while at < end and (child := children.get(keys[at : at + KEY_BYTES])):
            path.append(child)
            edge = child.edge
            begin, at = at, at + len(edge)
            same = keys[begin:at]  # a copy, which is faster than `startswith` with its checks
            if same != edge:
                shared = shared_blocks(edge, same)
                break
            children = child.children
        else:
            shared = (at - begin) // KEY_BYTES
        self._walked, self._path, self._before, self._shared = keys, path, begin // KEY_BYTES, shared
        return path, self._before, shared

    def _reshaped(self) -> None:
        """Invalidate the cached walk, which must not keep dropped nodes."""
        self._walked, self._path, self._before, self._shared = b"", self._no_path, 0, 0

    def _is_dead(self, replica: str, hold: Hold) -> bool:
        dead = self._dead.get(replica)
        return dead is not None and hold.used <= dead.floor

    def _list_of(self, replica: str, hold: Hold) -> UseList:
        """The list that contains the hold."""
        if self._dead and self._is_dead(replica, hold):
            return self._dead[replica]
        return self._uses[replica]

    # -- growing

    def _credit(
        self, replica: str, uses: UseList, keys: BlockKeys, weight: int, now: float, stale: float, confirmed: bool
    ) -> float | None:
        """Walk `keys`, splitting and growing the tree until a path spells them, and credit the path to `replica`.

        weight: of a block of a new path. Returns the last use of the replica's deepest hold on the path that has not expired.
        """
        path, start, shared = self._walk(keys)
        depth, end = len(path), len(keys)
        node, at = path[-1] if path else self._root, (start + shared) * KEY_BYTES
        if shared < node.length:
            hold = node.holders.get(replica)
            # Split where prompts diverge, and where the replica holds more than is used now.
            partly = hold is not None and hold.blocks > shared
            if (partly or at < end) and depth + node.height < self.max_edges:
                node = self._split(node, shared)
            elif partly:  # no split is possible: only blocks above this edge count as used
                assert node.parent is not None
                node, at, end = node.parent, start * KEY_BYTES, start * KEY_BYTES
                shared = node.length
            else:
                end = at
        if at < end:
            if depth < self.max_edges or not node.children:
                node = self._grow(node, keys[at:], weight)
                shared = node.length
            else:
                end = at
        self.credited = end // KEY_BYTES
        used: float | None = None
        tail: Hold | None = None
        blocks, parent = shared, node.parent
        while parent is not None:
            if self._dead:
                self._bury(node, replica)
            last = uses.use(node, replica, blocks, now, stale, confirmed)
            if last is None:
                self._holds += 1
            elif used is None and last > stale:
                used = last
            hold = uses.ring.staler  # the hold just used
            merged = len(node.children) == 1 and self._merge(node)
            if tail is None or (merged and tail.blocks == 0):
                tail = hold
            node, blocks, parent = parent, parent.length, parent.parent
        self.tail = tail
        return used

    def _bury(self, node: Node, replica: str) -> None:
        """Remove the replica's dead hold on the node, if any, before a live one replaces it."""
        hold = node.holders.get(replica)
        if hold is None or not self._is_dead(replica, hold):
            return
        dead = self._dead[replica]
        dead.shorten(hold, 0)
        dead.unlink(hold)
        del node.holders[replica]
        self._holds -= 1

    def _grow(self, node: Node, rest: BlockKeys, weight: int) -> Node:
        """Append `rest` under `node`: a leaf's edge is lengthened, else a new leaf is made. Returns the node at the end.

        weight: of a block if a new path begins; otherwise blocks have the weight of their path.
        """
        self._reshaped()
        self._edge_bytes += len(rest)
        if node is self._root or node.children:
            leaf = Node(rest, node, self._none, weight if node is self._root else node.weight)
            node.children[rest[:KEY_BYTES]] = leaf
            self._nodes += 1
            self._heaviest = max(self._heaviest, leaf.weight)
            self._raise(leaf)
            return leaf
        node.edge += rest
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge after `at` blocks (0 < at < its length). Returns the new upper node; `node` is the lower."""
        self._reshaped()
        cut = at * KEY_BYTES
        parent = node.parent
        assert parent is not None
        rest = node.edge[cut:]
        upper = Node(node.edge[:cut], parent, {rest[:KEY_BYTES]: node}, node.weight)
        parent.children[upper.edge[:KEY_BYTES]] = upper
        node.edge = rest
        node.parent = upper
        self._nodes += 1
        self._raise(node)
        for replica, hold in list(node.holders.items()):
            if hold.blocks <= at:
                del node.holders[replica]
                upper.holders[replica] = hold
                hold.node = upper
            else:
                above = upper.holders[replica] = Hold(upper, at, hold.used)
                self._list_of(replica, hold).link_after(above, hold)
                self._holds += 1
                hold.blocks -= at
                above.confirmed = min(hold.confirmed, at)
                hold.confirmed -= above.confirmed
                above.doomed = max(0, hold.doomed - hold.blocks)
                hold.doomed -= above.doomed
        return upper

    def _merge(self, node: Node) -> bool:
        """Undo an unneeded split: one child, each of whose holds was used together with the one above."""
        if len(node.children) != 1 or node is self._root:
            return False
        (child,) = node.children.values()
        for replica, hold in child.holders.items():
            above = node.holders[replica]
            if hold.fresher is not above or hold.used != above.used:
                return False
        self._reshaped()
        for replica, hold in child.holders.items():
            above, uses = node.holders[replica], self._list_of(replica, hold)
            if above.confirmed == above.blocks:
                above.confirmed += hold.confirmed
            else:  # confirmed blocks are always a prefix
                uses.pending += hold.confirmed * node.weight
            above.blocks += hold.blocks
            above.doomed += hold.doomed
            hold.blocks = 0  # tells `_credit` that the hold was merged
            uses.unlink(hold)
        self._holds -= len(child.holders)
        child.holders.clear()  # breaks cycles, which would exceed the memory bound until a garbage collection
        self._nodes -= 1
        node.edge += child.edge
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        node.height = child.height
        self._lower(node)
        return True

    def _raise(self, node: Node) -> None:
        """Raise the heights above `node` where necessary. O(edges above it)."""
        parent = node.parent
        while parent is not None and parent.height <= node.height:
            parent.height = node.height + 1
            node, parent = parent, parent.parent

    def _lower(self, node: Node) -> None:
        """The tree below `node` has become lower, or has lost a branch: update heights above it, as far as that is cheap."""
        parent = node.parent
        while parent is not None and len(parent.children) <= FEW_CHILDREN:
            height = 0
            for child in parent.children.values():
                height = max(height, child.height + 1)
            if height >= parent.height:
                return
            parent.height = height
            parent = parent.parent

    # -- shrinking

    def _drop(self, replica: str, uses: UseList, hold: Hold, keep: int) -> None:
        """Shorten a tail hold to its first `keep` blocks, and remove blocks without a holder. uses: the list with the hold."""
        uses.shorten(hold, keep)
        node = hold.node
        if keep == 0:
            del node.holders[replica]
            uses.unlink(hold)
            self._holds -= 1
        if node.children:
            self._merge(node)
        else:
            self._shorten(node)

    def _shorten(self, node: Node) -> None:
        """Cut a leaf's edge to its longest hold; remove the leaf if it has none."""
        longest = 0
        for hold in node.holders.values():
            longest = max(longest, hold.blocks)
        if longest == node.length:
            return
        self._reshaped()
        self._edge_bytes -= (node.length - longest) * KEY_BYTES
        if longest:
            node.edge = node.edge[: longest * KEY_BYTES]
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[:KEY_BYTES]]
        self._nodes -= 1
        self._lower(node)
        self._merge(parent)

    def _held_below(self, node: Node, replica: str) -> bool:
        """True if the replica has a hold on any child of the node; assumed if there are more than MAX_CHILDREN."""
        if len(node.children) > MAX_CHILDREN:
            return True
        return any(replica in child.holders for child in node.children.values())

    # -- invariants

    def _check_shape(self) -> None:
        """Raises AssertionError if an invariant at the top of this file is broken. O(everything)."""
        assert not self._root.holders
        assert not self._none
        nodes = edge_bytes = holds = 0
        stack = [(first, node, 1) for first, node in self._root.children.items()]
        while stack:
            first, node, depth = stack.pop()
            stack += ((key, child, depth + 1) for key, child in node.children.items())
            nodes += 1
            edge_bytes += len(node.edge)
            holds += len(node.holders)
            assert depth <= self.max_edges
            self._check_node(first, node)
        assert (nodes, edge_bytes) == (self._nodes, self._edge_bytes)
        for replica, uses in self._uses.items():
            self._check_uses(replica, uses, live=True)
        for replica, dead in self._dead.items():
            self._check_uses(replica, dead, live=False)
        assert holds == self._holds == sum(uses.count for lists in (self._uses, self._dead) for uses in lists.values())

    def _check_node(self, first: bytes, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children[first] is node
        assert parent.height > node.height
        assert node.edge[:KEY_BYTES] == first
        assert node.weight > 0
        assert node.weight == parent.weight or parent is self._root, "blocks of one path weigh the same"
        assert node.holders, "a node without a holder"
        assert node.children or max(hold.blocks for hold in node.holders.values()) == node.length
        for replica, hold in node.holders.items():
            assert hold.node is node
            assert 0 < hold.blocks <= node.length
            assert 0 <= hold.confirmed <= hold.blocks
            assert 0 <= hold.doomed <= hold.blocks
            if parent is not self._root:
                above = parent.holders[replica]
                assert above.blocks == parent.length, "a hole in a replica's prefix"
                assert above.used >= hold.used

    def _check_uses(self, replica: str, uses: UseList, *, live: bool) -> None:
        holds: list[Hold] = []
        hold, last = uses.ring.fresher, float("-inf")
        fresh: set[int] = set()
        while hold is not uses.ring:
            assert hold.node.holders[replica] is hold
            assert hold.fresher.staler is hold
            assert last <= hold.used
            assert self._is_dead(replica, hold) is not live
            assert id(hold.node.parent) not in fresh, "an ancestor is staler than its descendant"
            fresh.add(id(hold.node))
            holds.append(hold)
            hold, last = hold.fresher, hold.used
        assert len(holds) == uses.count
        doomed = [hold.doomed == hold.blocks for hold in holds if hold.doomed]
        assert not any(hold.doomed for hold in holds[len(doomed) :]), "doomed blocks are the stalest"
        assert all(doomed[:-1])
        assert sum(hold.blocks for hold in holds) == uses.blocks
        assert sum(hold.blocks * hold.node.weight for hold in holds) == uses.weight
        assert sum((hold.blocks - hold.confirmed) * hold.node.weight for hold in holds) == uses.pending
