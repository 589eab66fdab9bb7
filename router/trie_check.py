"""The proof of the prefix index: every invariant that tree.py and trie.py state on top, asserted on the whole structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.holds import Hold, Node, UseList
from router.types import KEY_BYTES

if TYPE_CHECKING:
    from router.trie import RadixTrie


def check(trie: RadixTrie) -> None:
    """Assert every invariant that the tops of tree.py and trie.py state. O(everything)."""
    nodes = edge_bytes = holds = 0
    stack = [(first, node, 1) for first, node in trie._root.children.items()]
    assert not trie._root.holders
    assert not trie._none
    while stack:
        first, node, depth = stack.pop()
        stack += ((key, child, depth + 1) for key, child in node.children.items())
        nodes += 1
        edge_bytes += len(node.edge)
        holds += len(node.holders)
        assert depth <= trie.max_edges
        _check_node(trie, first, node)
    assert (nodes, edge_bytes) == (trie._nodes, trie._edge_bytes)
    for replica, uses in trie._uses.items():
        _check_uses(trie, replica, uses, live=True)
    for replica, dead in trie._dead.items():
        _check_uses(trie, replica, dead, live=False)
        assert dead.floor < trie.now
    assert holds == trie._holds == sum(uses.count for lists in (trie._uses, trie._dead) for uses in lists.values())


def _check_node(trie: RadixTrie, first: bytes, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert parent.children[first] is node
    assert parent.height > node.height
    assert node.edge[:KEY_BYTES] == first
    assert node.holders, "a node that nobody holds"
    assert node.children or max(hold.blocks for hold in node.holders.values()) == node.length
    for replica, hold in node.holders.items():
        assert hold.node is node
        assert 0 < hold.blocks <= node.length
        assert 0 <= hold.confirmed <= hold.blocks
        assert 0 <= hold.doomed <= hold.blocks
        if parent is not trie._root:
            above = parent.holders[replica]
            assert above.blocks == parent.length, "a hole in a replica's prefix"
            assert above.used >= hold.used


def _check_uses(trie: RadixTrie, replica: str, uses: UseList, *, live: bool) -> None:
    holds: list[Hold] = []
    hold, last = uses.ring.fresher, float("-inf")
    fresh: set[int] = set()
    while hold is not uses.ring:
        assert hold.node.holders[replica] is hold
        assert hold.fresher.staler is hold
        assert last <= hold.used <= trie.now
        assert trie._is_dead(replica, hold) is not live
        assert id(hold.node.parent) not in fresh, "an ancestor is staler than its descendant"
        fresh.add(id(hold.node))
        holds.append(hold)
        hold, last = hold.fresher, hold.used
    assert len(holds) == uses.count
    doomed = [hold.doomed == hold.blocks for hold in holds if hold.doomed]
    assert not any(hold.doomed for hold in holds[len(doomed) :]), "doomed blocks are the stalest"
    assert all(doomed[:-1])
    assert sum(hold.blocks for hold in holds) == uses.blocks
    assert sum(hold.blocks - hold.confirmed for hold in holds) == uses.pending
