"""The benchmark's contestants remember what the production trie remembers, or the comparison would be of nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.router.contestants import BLOCK_BYTES, KINDS, BlockDicts, PlainPygtrie, Warmroute, installed, split
from router.index.trie import RadixTrie
from tests.support.strategies import keys_of, letters, replicas

NAMES = ["r1", "r2", "r3"]
HERE = [name for name, _ in installed()]


def filled(index: Any, trie: RadixTrie, inserts: list[tuple[str, bytes]]) -> None:
    for now, (replica, prompt) in enumerate(inserts):
        trie.insert(replica, keys_of(prompt), float(now))
        index.credit(replica, split(keys_of(prompt)), float(now))


@given(st.lists(st.tuples(replicas, letters), max_size=30), letters)
@pytest.mark.parametrize("kind", [PlainPygtrie, BlockDicts])
def test_they_match_as_the_trie_does(kind: Any, inserts: list[tuple[str, bytes]], asked: bytes) -> None:
    index, trie = kind(NAMES, random.Random(0)), RadixTrie(1e9, 1 << 30)
    for name in NAMES:
        trie.add_replica(name)
    filled(index, trie, inserts)
    assert index.match(split(keys_of(asked))) == trie.match(keys_of(asked), 100.0)
    assert index.blocks == trie.blocks


@given(st.lists(st.tuples(replicas, letters), max_size=60), letters, st.integers(min_value=1, max_value=8))
def test_dictionaries_evict_what_the_trie_evicts(inserts: list[tuple[str, bytes]], asked: bytes, capacity: int) -> None:
    index, trie = BlockDicts(NAMES, random.Random(0)), RadixTrie(1e9, 1 << 30)
    for name in NAMES:
        trie.add_replica(name, capacity)
    index.grow(capacity * len(NAMES))
    filled(index, trie, inserts)
    assert index.match(split(keys_of(asked))) == trie.match(keys_of(asked), 100.0)
    assert index.blocks == trie.blocks


@pytest.mark.parametrize("name", HERE)
def test_a_prompt_comes_back_to_where_it_was(name: str) -> None:
    """Whatever the contestant: the second time nothing but the partial block is computed, and all bookings are given back."""
    contestant = KINDS[name](NAMES, random.Random(0))
    contestant.grow(3_000)
    text = random.Random(1).randbytes(10 * BLOCK_BYTES)
    first = contestant.choose(text, 0.0)
    replica, tokens, uncached = contestant.work(first)
    assert (tokens, uncached) == (640, 640)
    contestant.first_token(first, 1.0)
    contestant.close(first, 2.0)
    assert contestant.blocks == 10
    again = contestant.choose(text, 3.0)
    assert contestant.work(again) == (replica, 640, 0)
    contestant.first_token(again, 4.0)
    contestant.close(again, 5.0)
    if isinstance(contestant, Warmroute):
        contestant.router.check()
        assert contestant.router.ledger.open_leases == 0


def test_the_production_router_is_always_among_them() -> None:
    assert HERE[:3] == ["warmroute", "pygtrie", "dictionaries"]
