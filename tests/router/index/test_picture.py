"""The picture of the index: what it shows is what the index believes, within its bounds."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from router.index.picture import LOOKED_AT, LOOKED_AT_HOLDS, MAX_HOLDERS, DrawnNode, Picture
from router.index.trie import RadixTrie
from router.types import KEY_BYTES, TOKEN_WEIGHT

TTL_S = 100.0


def keys(*numbers: int) -> bytes:
    """Chained, as real ones are: a key stands for all before it."""
    made, last = b"", 7
    for number in numbers:
        last = (last * 1_000_003 + number + 1) % (1 << 64)
        made += struct.pack("<Q", last)
    return made


def trie_of(*replicas: str) -> RadixTrie:
    trie = RadixTrie(TTL_S, 1 << 24)
    for replica in replicas:
        trie.add_replica(replica)
    return trie


def every(drawn: DrawnNode) -> Iterator[DrawnNode]:
    yield drawn
    for child in drawn.shown:
        yield from every(child)


def test_a_small_tree() -> None:
    trie = trie_of("a", "b")
    trie.insert("a", keys(1, 2, 3, 4), 1.0, weight=64 * TOKEN_WEIGHT)
    trie.insert("b", keys(1, 2, 9), 5.0, weight=64 * TOKEN_WEIGHT)
    trie.insert("b", keys(5), 7.0, weight=32 * TOKEN_WEIGHT)
    root = Picture(trie, 10.0, 2, 10, 100).draw([])
    assert (root.way, root.blocks, root.children, root.idle_s) == ([], 0, 2, None)
    newest, head = root.shown
    assert (newest.tokens, newest.idle_s, newest.holders[0].replica) == (32, 3.0, "b")
    assert (head.blocks, head.tokens, head.depth_tokens, head.children) == (2, 128, 0, 2)
    assert [(each.replica, each.blocks, each.idle_s) for each in head.holders] == [("b", 2, 5.0), ("a", 2, 9.0)]
    assert [each.depth_tokens for each in head.shown] == [128, 128]
    below = Picture(trie, 10.0, 1, 10, 100).draw(head.shown[0].way)
    assert below.way == head.shown[0].way
    assert below.depth_tokens == 128


def test_of_a_node_with_many_branches_the_newest_are_shown() -> None:
    trie = trie_of("a")
    branches = LOOKED_AT + 500
    for number in range(branches):
        trie.insert("a", keys(1, number), number / 64)
    (head,) = Picture(trie, branches / 64, 2, 3, 10).draw([]).shown
    assert head.children == branches
    assert [each.idle_s for each in head.shown] == [1 / 64, 2 / 64, 3 / 64]


def test_it_can_be_drawn_in_steps_while_the_tree_changes() -> None:
    trie = trie_of("a", "b")
    for number in range(8):
        trie.insert("a", keys(number, 1), 1.0 + number)
        trie.insert("a", keys(number, 2), 1.0 + number)
    whole = list(Picture(trie, 10.0, 3, 10, 100).steps([]))
    assert whole[:-1] == [None] * 9, "one for the root, and one for each head"
    assert whole[-1] == Picture(trie, 10.0, 3, 10, 100).draw([])
    steps = Picture(trie, 10.0, 3, 10, 100).steps([])
    next(steps)
    trie.insert("a", keys(7, 1), 12.0)
    trie.purge("a")
    trie.insert("b", keys(0, 1, 5), 13.0)
    root = list(steps)[-1]
    assert root is not None
    assert len(root.shown) == 8
    assert [each.holders[0].replica for each in root.shown if each.holders] == ["b"]
    assert all((each.idle_s or 0.0) >= 0 for each in every(root))


def test_of_children_with_many_holders_fewer_are_looked_at() -> None:
    trie = trie_of(*(f"r{number}" for number in range(64)))
    branches = 2 * LOOKED_AT_HOLDS // 64
    for number in range(branches):
        for replica in range(64):
            trie.insert(f"r{replica}", keys(1, number), number / 64)
    trie.insert("r0", keys(1, 0), branches / 64)  # the oldest child, which is not looked at
    (head,) = Picture(trie, branches / 64, 2, 300, 400).draw([]).shown
    assert (head.children, len(head.shown)) == (branches, LOOKED_AT_HOLDS // 64)


def test_a_way_that_no_longer_leads_anywhere() -> None:
    trie = trie_of("a")
    trie.insert("a", keys(1, 2, 3), 1.0)
    way = Picture(trie, 1.0, 1, 9, 9).draw([]).shown[0].way
    assert Picture(trie, 1.0, 1, 9, 9).draw([*way, keys(8)]).way == way
    assert Picture(trie, 1.0, 1, 9, 9).draw([keys(8)]).way == []


def test_what_has_expired_or_was_purged_is_held_by_nobody() -> None:
    trie = trie_of("a", "b")
    trie.insert("a", keys(1, 2), 1.0)
    trie.insert("b", keys(3, 4), 90.0)
    trie.purge("b")
    assert all(not each.holders for each in every(Picture(trie, 150.0, 2, 9, 9).draw([])))


def test_a_picture_is_bounded() -> None:
    names = [f"r{number}" for number in range(MAX_HOLDERS + 8)]
    trie = trie_of(*names)
    for number in range(LOOKED_AT + 500):
        trie.insert("r0", keys(number, 1), number / 100)
    for name in names:
        trie.insert(name, keys(7, 7), 30.0)
    root = Picture(trie, 30.0, 3, 50, 40).draw([])
    assert root.children == LOOKED_AT + 500
    assert len(list(every(root))) == 40
    shared = root.shown[0]
    assert (len(shared.holders), shared.further) == (MAX_HOLDERS, 8)
    assert [each.idle_s for each in root.shown] == sorted(each.idle_s or 0.0 for each in root.shown)
    few = Picture(trie, 30.0, 1, 5, 100).draw([])
    assert len(few.shown) == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=6)), max_size=30))
def test_the_whole_picture_has_all_that_is_held(prompts: Sequence[tuple[str, list[int]]]) -> None:
    """Every prompt is spelled by ways of the picture, and their holders are those of `match`."""
    trie = trie_of("a", "b", "c")
    for at, (replica, numbers) in enumerate(prompts):
        trie.insert(replica, keys(*numbers), float(at))
    drawn = list(every(Picture(trie, float(len(prompts)), 64, 1000, 10_000).draw([])))
    assert sum(each.blocks * len(each.holders) for each in drawn) >= trie.blocks
    assert sum(holder.blocks for each in drawn for holder in each.holders) == trie.blocks
    for each in drawn:
        assert all(0 < holder.blocks <= each.blocks for holder in each.holders)
        assert each.children == len(each.shown)
        assert all(len(key) == KEY_BYTES for key in each.way)
