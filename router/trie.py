"""Which replica is believed to hold which prefix: a path-compressed radix tree over block keys.

An edge is a run of keys (bytes, KEY_BYTES each); a node is the end of one edge. Keys are chained, so edges compare as plain
bytes. A `Hold` says that a replica holds the first `blocks` blocks of a node's edge; holds are prefix-closed:

    root ── "abc" (r1: 3, r2: 2) ──┬── "de" (r1: 2)          r1 holds abc, abcde, abcx; r2 holds ab.
                                   └── "x"  (r1: 1)

- a replica that holds any block of a node holds every block of the node's ancestors;
- a hold that stops inside an edge has no hold of that replica below it, so r2 above costs no split;
- every edge ends where its longest hold ends, and every leaf has a hold: nothing is stored that nobody holds.

Each replica's holds form a list in order of last use. One `insert` moves the holds of its path to the fresh end, deepest
first, so that the stale end is always a tail: forgetting from there never breaks prefix closure. TTL, per-replica capacity
and the memory bound all forget from the stale end; they are enforced at every insert. An edge is split where prompts
diverge and where use diverges; a node with one child is merged with it once their uses are one again.

Time is an argument (seconds, any origin). A clock that goes backwards counts as one that stands still.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.blocks import shared_blocks
from router.holds import HOLD_BYTES, NODE_BYTES, Hold, Node, UseList
from router.learned import Ratio
from router.trie_check import check
from router.types import KEY_BYTES, BlockKeys


class RadixTrie:
    """See the top of this file. Replicas are named by strings and must be added before they can hold anything."""

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        self.evicted = dict.fromkeys(("ttl", "capacity", "memory", "purge", "correction"), 0)  # blocks forgotten, by why
        self._root = Node(b"", None, {})
        self._none: dict[bytes, Node] = {}  # the children of a leaf, which gets none: its edge is lengthened, or split
        self._uses: dict[str, UseList] = {}
        self.now = float("-inf")
        self._nodes = 0
        self._edge_bytes = 0
        self._holds = 0
        self.lifetime: Ratio | None = None  # seconds that blocks go unused before they are evicted for want of room

    # -- what it knows

    @property
    def size_bytes(self) -> int:
        """Estimated memory. O(1)."""
        return self._nodes * NODE_BYTES + self._edge_bytes + self._holds * HOLD_BYTES

    @property
    def blocks(self) -> int:
        """Block credits summed over replicas. O(replicas)."""
        return sum(uses.blocks for uses in self._uses.values())

    def held(self) -> Mapping[str, int]:
        """Blocks credited to each replica. O(replicas)."""
        return {replica: uses.blocks for replica, uses in self._uses.items()}

    def held_by(self, replica: str) -> int:
        """Blocks credited to one replica. O(1)."""
        uses = self._uses.get(replica)
        return uses.blocks if uses else 0

    def room(self, replica: str, blocks: int) -> tuple[int, float]:
        """(what the replica would have to evict to take in `blocks` more, when the stalest of it was last used). O(1)."""
        uses = self._uses.get(replica)
        if uses is None or uses.capacity is None or not uses.count:
            return 0, 0.0
        out = uses.blocks + blocks - uses.capacity
        return (out if out > 0 else 0), uses.ring.fresher.used

    def used_since(self, replica: str, since: float) -> int:
        """Blocks of a replica that were used after `since`. O(holds used after it)."""
        uses = self._uses.get(replica)
        return uses.used_since(since) if uses else 0

    def match(self, keys: BlockKeys, now: float) -> dict[str, int]:
        """replica -> leading blocks of `keys` that it is believed to hold; replicas that hold none are left out.

        Reads only. O(edges on the path x their holders), plus one binary search at the divergence.
        """
        alive = max(self.now, now) - self.ttl_s
        found: dict[str, int] = {}
        path, before, shared = self._walk(keys)
        start, known = 0, before + shared
        for node in path:
            for replica, hold in node.holders.items():
                if hold.used > alive:
                    blocks = start + hold.blocks
                    found[replica] = blocks if blocks < known else known
            start += node.length
        return found

    # -- what changes it

    def add_replica(self, replica: str, capacity: int | None = None) -> None:
        """Make `replica` known, or change its capacity (in blocks; None: unbounded), forgetting what no longer fits."""
        if uses := self._uses.get(replica):
            uses.capacity = capacity
            self._enforce_capacity(replica, uses)
        else:
            self._uses[replica] = UseList(Hold(self._root, 0, 0.0), capacity)

    def remove_replica(self, replica: str) -> None:
        """Forget a replica and all it holds. O(its holds). Unknown names are ignored."""
        self.purge(replica)
        if uses := self._uses.pop(replica, None):
            uses.close()

    def purge(self, replica: str) -> None:
        """Forget what a replica holds (it restarted) but not the replica. O(its holds)."""
        uses = self._uses.get(replica)
        while uses and (hold := uses.stalest):
            self._forget(replica, uses, hold, 0, "purge")

    def insert(self, replica: str, keys: BlockKeys, now: float) -> float | None:
        """Credit `replica` with all blocks of `keys`, used now, and enforce every bound.

        Returns for how many seconds the deepest of the blocks that it held already had not been used; None if it held none.
        O(edges on the path), plus O(1) amortised for each hold that is forgotten. Unknown replicas are ignored (they left
        while their request was running).
        """
        uses = self._uses.get(replica)
        if uses is None:
            return None
        self.now = now = max(self.now, now)
        self._expire(replica, uses)
        if not keys:
            return None
        used = self._credit(replica, uses, keys, now)
        self._enforce_capacity(replica, uses)
        self._enforce_memory()
        return None if used is None else now - used

    def forget(self, replica: str, keys: BlockKeys, keep: int) -> None:
        """Take from `replica` everything below the first `keep` blocks of `keys`: the path's rest and all its branches.

        O(edges on the path + holds of the replica below it).
        """
        uses = self._uses.get(replica)
        if uses is None:
            return
        path, before, shared = self._walk(keys)
        start, known = 0, before + shared
        for node in path:
            hold = node.holders.get(replica)
            if hold is None:
                return
            end = start + node.length
            if keep < min(end, known):
                self._forget_below(replica, uses, node)
                self._forget(replica, uses, hold, max(0, keep - start), "correction")
                return
            start = end

    def expire(self, now: float) -> None:
        """Forget all that is past its TTL. O(replicas + holds forgotten). For a sweep while nothing is inserted."""
        self.now = max(self.now, now)
        for replica, uses in self._uses.items():
            self._expire(replica, uses)

    # -- the path

    def _walk(self, keys: BlockKeys) -> tuple[list[Node], int, int]:
        """(nodes, root excluded; blocks before the last one's edge; leading blocks of its edge that `keys` shares).

        `keys` shares all of the other edges, and of the last at least one block; both numbers are 0 if there are no nodes.
        """
        path: list[Node] = []
        children, begin, at, end = self._root.children, 0, 0, len(keys)
        while at < end and (child := children.get(keys[at : at + KEY_BYTES])):
            path.append(child)
            edge = child.edge
            begin, at = at, at + len(edge)
            same = keys[begin:at]  # a copy, which takes less than what `startswith` does around its comparison
            if same != edge:
                return path, begin // KEY_BYTES, shared_blocks(edge, same)
            children = child.children
        return path, begin // KEY_BYTES, (at - begin) // KEY_BYTES

    def _credit(self, replica: str, uses: UseList, keys: BlockKeys, now: float) -> float | None:
        """Walk `keys`, splitting and growing the tree until a path spells them, and give the path to `replica`.

        Returns when the deepest hold of the replica on the path was last used.
        """
        path, start, shared = self._walk(keys)
        node, at = path[-1] if path else self._root, (start + shared) * KEY_BYTES
        if shared < node.length:
            hold = node.holders.get(replica)
            # Cut where prompts diverge, and where the replica holds more than is used now.
            if at < len(keys) or (hold is not None and hold.blocks > shared):
                node = self._split(node, shared)
        if at < len(keys):
            node = self._grow(node, keys[at:])
            shared = node.length
        used: float | None = None
        blocks, parent = shared, node.parent
        while parent is not None:
            last = uses.use(node, replica, blocks, now)
            if last is None:
                self._holds += 1
            elif used is None:
                used = last
            if len(node.children) == 1:
                self._merge(node)
            node, blocks, parent = parent, parent.length, parent.parent
        return used

    def _grow(self, node: Node, rest: BlockKeys) -> Node:
        """Append `rest` under `node`: a leaf's edge is lengthened, else a new leaf is made. Returns where it ends."""
        self._edge_bytes += len(rest)
        if node is self._root or node.children:
            leaf = Node(rest, node, self._none)
            node.children[rest[:KEY_BYTES]] = leaf
            self._nodes += 1
            return leaf
        node.edge += rest
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node's edge after `at` blocks (0 < at < its length). Returns the new upper node; `node` is the lower."""
        cut = at * KEY_BYTES
        parent = node.parent
        assert parent is not None
        rest = node.edge[cut:]
        upper = Node(node.edge[:cut], parent, {rest[:KEY_BYTES]: node})
        parent.children[upper.edge[:KEY_BYTES]] = upper
        node.edge = rest
        node.parent = upper
        self._nodes += 1
        for replica, hold in list(node.holders.items()):
            if hold.blocks <= at:
                del node.holders[replica]
                upper.holders[replica] = hold
                hold.node = upper
            else:
                above = upper.holders[replica] = Hold(upper, at, hold.used)
                self._uses[replica].link_after(above, hold)
                self._holds += 1
                hold.blocks -= at
        return upper

    def _merge(self, node: Node) -> None:
        """Undo a split that no longer divides anything: one child, and each of its holds was used with the one above."""
        if len(node.children) != 1 or node is self._root:
            return
        (child,) = node.children.values()
        for replica, hold in child.holders.items():
            above = node.holders[replica]
            if hold.fresher is not above or hold.used != above.used:
                return
        for replica, hold in child.holders.items():
            node.holders[replica].blocks += hold.blocks
            hold.blocks = 0  # tells `_forget_below` that it is gone
            self._uses[replica].unlink(hold)
        self._holds -= len(child.holders)
        child.holders.clear()  # else they keep each other alive until a garbage collection, past the memory bound
        self._nodes -= 1
        node.edge += child.edge
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node

    # -- forgetting

    def _forget_below(self, replica: str, uses: UseList, node: Node) -> None:
        """Take all of a replica's holds in the subtrees under `node`, deepest first."""
        nodes, below = [node], []
        while nodes:
            holds = [child.holders[replica] for child in nodes.pop().children.values() if replica in child.holders]
            below += holds
            nodes += (hold.node for hold in holds)
        for hold in reversed(below):
            if hold.blocks:
                self._forget(replica, uses, hold, 0, "correction")

    def _forget(self, replica: str, uses: UseList, hold: Hold, keep: int, reason: str) -> None:
        """Shorten a tail hold to its first `keep` blocks, and drop what then nobody holds."""
        if keep >= hold.blocks:
            return
        self.evicted[reason] += hold.blocks - keep
        uses.blocks -= hold.blocks - keep
        hold.blocks = keep
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
        """End a leaf's edge where its longest hold ends; remove the leaf if it has none."""
        longest = 0
        for hold in node.holders.values():
            longest = max(longest, hold.blocks)
        if longest == node.length:
            return
        self._edge_bytes -= (node.length - longest) * KEY_BYTES
        if longest:
            node.edge = node.edge[: longest * KEY_BYTES]
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[:KEY_BYTES]]
        self._nodes -= 1
        self._merge(parent)

    def _expire(self, replica: str, uses: UseList) -> None:
        while (hold := uses.stalest) and hold.used <= self.now - self.ttl_s:
            self._forget(replica, uses, hold, 0, "ttl")

    def _enforce_capacity(self, replica: str, uses: UseList) -> None:
        while uses.capacity is not None and uses.blocks > uses.capacity and (hold := uses.stalest):
            evicted = min(hold.blocks, uses.blocks - uses.capacity)
            self._learn_lifetime(self.now - hold.used, evicted, uses.capacity)
            self._forget(replica, uses, hold, hold.blocks - evicted, "capacity")

    def _learn_lifetime(self, idle_s: float, blocks: int, capacity: int) -> None:
        """Old evidence halves with every cache that is turned over."""
        if self.lifetime is None:
            self.lifetime = Ratio(max(idle_s, 1.0), blocks, max(capacity, 1))
        else:
            self.lifetime.learn(max(idle_s, 1e-3) * blocks, blocks, blocks)

    def _enforce_memory(self) -> None:
        """Forget the stalest holds of all replicas until the bound holds. O(replicas) for each hold forgotten."""
        while self.size_bytes > self.max_bytes and self._holds:
            stalest = (
                (hold.used, replica, uses, hold) for replica, uses in self._uses.items() if (hold := uses.stalest) is not None
            )
            _, replica, uses, hold = min(stalest, key=lambda item: item[0])
            self._forget(replica, uses, hold, 0, "memory")

    # -- proof

    def check(self) -> None:
        """Assert every invariant that the top of this file states. O(everything)."""
        check(self)

    def __repr__(self) -> str:
        return f"<RadixTrie {self._nodes} nodes, {self.blocks} blocks on {len(self._uses)} replicas, {self.size_bytes} bytes>"
