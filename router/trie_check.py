"""The proof of the radix tree: every invariant that the top of trie.py states, asserted on the whole structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.holds import Node, UseList
from router.types import KEY_BYTES

if TYPE_CHECKING:
    from router.trie import RadixTrie


def check(trie: RadixTrie) -> None:
    """Assert every invariant that the top of trie.py states. O(everything)."""
    nodes = edge_bytes = 0
    blocks = dict.fromkeys(trie._uses, 0)
    stack = list(trie._root.children.items())
    assert not trie._root.holders
    assert not trie._none
    while stack:
        first, node = stack.pop()
        stack += node.children.items()
        nodes += 1
        edge_bytes += len(node.edge)
        _check_node(trie, first, node)
        for replica, hold in node.holders.items():
            blocks[replica] += hold.blocks
    assert (nodes, edge_bytes) == (trie._nodes, trie._edge_bytes)
    assert blocks == {replica: uses.blocks for replica, uses in trie._uses.items()}
    assert trie._holds == sum(_check_uses(trie, replica, uses) for replica, uses in trie._uses.items())


def _check_node(trie: RadixTrie, first: bytes, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert parent.children[first] is node
    assert node.edge[:KEY_BYTES] == first
    assert node.holders, "a node that nobody holds"
    assert node.children or max(hold.blocks for hold in node.holders.values()) == node.length
    for replica, hold in node.holders.items():
        assert hold.node is node
        assert 0 < hold.blocks <= node.length
        if parent is not trie._root:
            above = parent.holders[replica]
            assert above.blocks == parent.length, "a hole in a replica's prefix"
            assert above.used >= hold.used


def _check_uses(trie: RadixTrie, replica: str, uses: UseList) -> int:
    assert uses.capacity is None or uses.blocks <= uses.capacity
    count, hold, last = 0, uses.ring.fresher, float("-inf")
    fresh: set[int] = set()
    while hold is not uses.ring:
        assert hold.node.holders[replica] is hold
        assert hold.fresher.staler is hold
        assert last <= hold.used <= trie.now
        assert id(hold.node.parent) not in fresh, "an ancestor is staler than its descendant"
        fresh.add(id(hold.node))
        count, hold, last = count + 1, hold.fresher, hold.used
    assert count == uses.count
    return count
