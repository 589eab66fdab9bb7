"""The block cache against an oracle that keeps whole prefixes in a list, least recently used first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.prefix_cache import BLOCK, Lease, PrefixCache, block_keys

CAPACITY = 12


def keys_of(branch: int, length: int) -> list[int]:
    """A path of keys: branches share their first three blocks."""
    return [at if at < 3 else branch * 100 + at for at in range(1, length + 1)]


class CacheMachine(RuleBasedStateMachine):
    """The oracle: which keys each lease holds, and all idle keys in the order in which they are to be forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(CAPACITY)
        self.leases: list[tuple[Lease, list[int], int]] = []
        self.idle: list[int] = []

    def held(self) -> set[int]:
        return {key for lease, _, _ in self.leases for key in lease.held}

    def private(self) -> int:
        return sum(private for _, _, private in self.leases)

    @rule(branch=st.integers(0, 3), length=st.integers(0, 8), extra=st.integers(0, 5))
    def reserve(self, branch: int, length: int, extra: int) -> None:
        keys = keys_of(branch, length)
        present = self.held() | set(self.idle)
        matched = next((at for at, key in enumerate(keys) if key not in present), len(keys))
        hits, need = keys[:matched], length + extra - matched
        fits = need + len(self.held() | set(hits)) + self.private() <= CAPACITY
        lease = self.cache.reserve(keys, length + extra)
        assert (lease is not None) == fits
        if lease is None:
            return
        assert lease.held == hits
        self.idle = [key for key in self.idle if key not in hits]
        self.leases.append((lease, keys, need))
        while len(self.held()) + len(self.idle) + self.private() > CAPACITY:
            self.idle.pop(0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, keys, private = self.leases[at]
        size = data.draw(st.integers(0, len(keys)))
        new = keys[len(lease.held) : size]
        self.cache.commit(lease, keys[:size])
        self.idle = [key for key in self.idle if key not in new]
        self.leases[at] = (lease, keys, private - len(new))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        held = list(lease.held)
        self.cache.release(lease)
        self.idle += [key for key in reversed(held) if key not in self.held()]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.idle.clear()

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert self.cache.used == len(self.held()) + self.private()
        for branch in range(4):
            keys = keys_of(branch, 8)
            present = self.held() | set(self.idle)
            assert self.cache.match(keys) == next((at for at, key in enumerate(keys) if key not in present), 8)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_key_stands_for_the_whole_prefix() -> None:
    head, tail = list(range(BLOCK)), list(range(100, 100 + BLOCK))
    assert block_keys(head + tail)[0] == block_keys(head)[0]
    assert block_keys(head + tail)[1] != block_keys(tail + tail)[1]
    assert block_keys(head[:-1]) == []


def test_the_tail_is_forgotten_before_the_head() -> None:
    cache = PrefixCache(4)
    lease = cache.reserve([1, 2, 3, 4], 4)
    assert lease is not None
    cache.commit(lease, [1, 2, 3, 4])
    cache.release(lease)
    assert cache.reserve([9], 1) is not None
    assert cache.match([1, 2, 3, 4]) == 3


def test_more_than_reserved_cannot_be_committed() -> None:
    cache = PrefixCache(4)
    lease = cache.reserve([], 1)
    assert lease is not None
    with pytest.raises(ValueError, match="more blocks than it reserved"):
        cache.commit(lease, [1, 2])
    assert repr(cache) == "<PrefixCache 4 blocks: 1 held, 0 idle, 0 private>"


def test_a_cache_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        PrefixCache(0)
