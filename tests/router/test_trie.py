"""The trie against a plain oracle: one pygtrie per replica, one entry per block, evicted one by one."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pygtrie
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from router.trie import RadixTrie
from tests.machines import STEPS, CountedMachine, steps_of
from tests.strategies import keys_of, letters, replicas

TTL = 10.0
PLENTY = 1 << 30


class Oracle:
    """What the trie means, with no compression and no cleverness: every block of every replica is one pygtrie entry."""

    def __init__(self) -> None:
        self.now = float("-inf")
        self.touches = 0
        self.held: dict[str, pygtrie.Trie] = {}
        self.capacity: dict[str, int | None] = {}

    def add(self, replica: str, capacity: int | None) -> None:
        self.held.setdefault(replica, pygtrie.Trie())
        self.capacity[replica] = capacity
        self.shrink(replica)

    def insert(self, replica: str, prompt: bytes, now: float) -> float | None:
        if replica not in self.held:
            return None
        self.now = max(self.now, now)
        self.touches += 1
        self.expire(replica)
        deepest = self.held[replica].longest_prefix(prompt)
        idle = self.now - deepest.value[1] if deepest else None
        for end in range(1, len(prompt) + 1):
            self.held[replica][prompt[:end]] = (self.touches, self.now)
        self.shrink(replica)
        return idle

    def expire(self, replica: str) -> None:
        for block, (_, used) in list(self.held[replica].items()):
            if used <= self.now - TTL:
                del self.held[replica][block]

    def shrink(self, replica: str) -> None:
        held, capacity = self.held[replica], self.capacity[replica]
        while capacity is not None and len(held) > capacity:
            del held[min(held, key=lambda block: (held[block][0], -len(block)))]

    def forget(self, replica: str, prompt: bytes, keep: int) -> None:
        if replica in self.held and keep < len(prompt) and self.held[replica].has_node(prompt[: keep + 1]):
            del self.held[replica][prompt[: keep + 1] :]

    def room(self, replica: str, blocks: int) -> tuple[int, float]:
        held, capacity = self.held.get(replica), self.capacity.get(replica)
        if not held or capacity is None:
            return 0, 0.0
        return max(0, len(held) + blocks - capacity), min(held.values())[1]

    def used_since(self, replica: str, since: float) -> int:
        return sum(used > since for _, used in self.held.get(replica, pygtrie.Trie()).values())

    def match(self, prompt: bytes, now: float) -> dict[str, int]:
        alive = max(self.now, now) - TTL
        found = {}
        for replica, held in self.held.items():
            blocks = sum(1 for step in held.prefixes(prompt) if step.value[1] > alive)
            if blocks:
                found[replica] = blocks
        return found


class TrieMachine(CountedMachine):
    @initialize()
    def start(self) -> None:
        self.trie, self.oracle, self.now = RadixTrie(TTL, PLENTY), Oracle(), 0.0
        self.prompts: set[bytes] = {b""}
        for replica, capacity in (("r1", None), ("r2", 6)):
            self.add(replica, capacity)

    @rule(replica=replicas, capacity=st.none() | st.integers(0, 12))
    def add(self, replica: str, capacity: int | None) -> None:
        self.trie.add_replica(replica, capacity)
        self.oracle.add(replica, capacity)

    @rule(replica=replicas)
    def remove(self, replica: str) -> None:
        self.trie.remove_replica(replica)
        self.oracle.held.pop(replica, None)

    @rule(replica=replicas)
    def purge(self, replica: str) -> None:
        self.trie.purge(replica)
        if replica in self.oracle.held:
            self.oracle.held[replica].clear()

    @rule(replica=replicas, prompt=letters)
    def insert(self, replica: str, prompt: bytes) -> None:
        self.prompts.add(prompt)
        assert self.trie.insert(replica, keys_of(prompt), self.now) == self.oracle.insert(replica, prompt, self.now)

    @rule(data=st.data(), replica=replicas, more=letters)
    def extend(self, data: st.DataObject, replica: str, more: bytes) -> None:
        """The next turn of a conversation, the case that the tree is made for."""
        self.insert(replica, data.draw(st.sampled_from(sorted(self.prompts))) + more)

    @rule(replica=replicas, prompt=letters, keep=st.integers(0, 9))
    def forget(self, replica: str, prompt: bytes, keep: int) -> None:
        self.trie.forget(replica, keys_of(prompt), keep)
        self.oracle.forget(replica, prompt, keep)

    @rule(data=st.data(), replica=replicas, length=st.integers(1, 9))
    def shorten(self, data: st.DataObject, replica: str, length: int) -> None:
        """The head of a known prompt is used again, without its tail."""
        self.insert(replica, data.draw(st.sampled_from(sorted(self.prompts)))[:length])

    @rule(seconds=st.sampled_from([-3.0, 0.5, 4.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.trie.expire(self.now)
        self.oracle.now = max(self.oracle.now, self.now)
        for replica in self.oracle.held:
            self.oracle.expire(replica)

    @rule(replica=replicas, blocks=st.integers(0, 15))
    def room(self, replica: str, blocks: int) -> None:
        assert self.trie.room(replica, blocks) == self.oracle.room(replica, blocks)

    @rule(replica=replicas, back=st.sampled_from([-1.0, 0.0, 0.5, 4.0, 5.0, 30.0]))
    def used_since(self, replica: str, back: float) -> None:
        assert self.trie.used_since(replica, self.now - back) == self.oracle.used_since(replica, self.now - back)

    @rule(prompt=letters)
    def match(self, prompt: bytes) -> None:
        assert self.trie.match(keys_of(prompt), self.now) == self.oracle.match(prompt, self.now)

    @invariant()
    def agrees(self) -> None:
        self.trie.check()
        assert self.trie.held() == {replica: len(held) for replica, held in self.oracle.held.items()}
        assert self.trie.blocks == sum(self.trie.held_by(replica) for replica in self.oracle.held)
        for prompt in self.prompts:
            assert self.trie.match(keys_of(prompt), self.now) == self.oracle.match(prompt, self.now)


def test_the_trie_and_its_oracle_agree_at_every_step() -> None:
    assert steps_of(TrieMachine, examples=280, steps=50) >= STEPS


def trie_with(*names: str, capacity: int | None = None, max_bytes: int = PLENTY, ttl: float = TTL) -> RadixTrie:
    trie = RadixTrie(ttl, max_bytes)
    for name in names:
        trie.add_replica(name, capacity)
    return trie


def test_a_growing_conversation_stays_one_node() -> None:
    trie = trie_with("r1")
    for end in range(10, 200, 10):
        trie.insert("r1", keys_of(bytes(end)), 0.0)
    assert repr(trie).startswith("<RadixTrie 1 nodes, 190 blocks")


def test_a_split_is_undone_when_its_reason_is_gone() -> None:
    trie = trie_with("r1", "r2")
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r2", keys_of(b"aabb"), 0.0)
    assert repr(trie).startswith("<RadixTrie 3 nodes")
    trie.remove_replica("r2")
    assert repr(trie).startswith("<RadixTrie 1 nodes, 4 blocks")
    trie.check()


def test_an_evicted_branch_leaves_no_split_behind() -> None:
    trie = trie_with("r1", capacity=6)
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r1", keys_of(b"aabb"), 1.0)
    trie.insert("r1", keys_of(b"aabbcc"), 2.0)  # pushes out the tail of the first
    assert trie.match(keys_of(b"aaaa"), 2.0) == {"r1": 2}
    assert repr(trie).startswith("<RadixTrie 1 nodes, 6 blocks")


def test_a_shorter_prompt_does_not_prolong_its_tail() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r1", keys_of(b"aa"), 5.0)
    assert trie.match(keys_of(b"aaaa"), 9.9) == {"r1": 4}
    assert trie.match(keys_of(b"aaaa"), 10.0) == {"r1": 2}


def test_forgetting_takes_the_rest_of_the_path_and_nothing_beside_it() -> None:
    trie = trie_with("r1")
    for prompt in (b"aabb", b"aacc", b"aabbdd"):
        trie.insert("r1", keys_of(prompt), 0.0)
    trie.forget("r1", keys_of(b"aabb"), 4)
    trie.forget("r1", keys_of(b"aa"), 2)
    assert trie.match(keys_of(b"aabbdd"), 0.0) == {"r1": 6}, "all was kept"
    trie.forget("r1", keys_of(b"aabb"), 2)
    assert trie.match(keys_of(b"aabbdd"), 0.0) == {"r1": 2}
    assert trie.match(keys_of(b"aacc"), 0.0) == {"r1": 4}, "another branch"


def test_uses_at_the_same_instant_keep_their_order() -> None:
    trie = trie_with("r1", capacity=3)
    for prompt in (b"ab", b"x", b"a", b"y"):  # the tail b was used before x, its head a after it
        trie.insert("r1", keys_of(prompt), 0.0)
    assert trie.match(keys_of(b"ab"), 0.0) == {"r1": 1}
    assert trie.match(keys_of(b"x"), 0.0) == {"r1": 1}


def test_memory_is_taken_from_the_stalest_of_all_replicas() -> None:
    trie = trie_with("old", "new", max_bytes=20_000)
    trie.insert("old", keys_of(b"old"), 0.0)
    for turn in range(100):
        trie.insert("new", keys_of(b"new" + bytes([turn])), 1.0 + turn / 100)
    assert trie.evicted["memory"] > 3
    assert trie.match(keys_of(b"old"), 2.0) == {}
    assert trie.match(keys_of(b"new" + bytes([99])), 2.0) == {"new": 4}


def test_a_shorter_prompt_keeps_only_its_own_part_fresh() -> None:
    trie = trie_with("r1", capacity=5)
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r1", keys_of(b"aa"), 1.0)  # used again, but not its tail
    trie.insert("r1", keys_of(b"b"), 2.0)
    trie.insert("r1", keys_of(b"cc"), 3.0)  # needs two blocks: the tail of aaaa goes, its head stays
    assert trie.match(keys_of(b"aaaa"), 3.0) == {"r1": 2}
    assert trie.match(keys_of(b"b"), 3.0) == {"r1": 1}


def test_time_to_live_counts_from_the_last_use() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"aa"), 0.0)
    trie.insert("r1", keys_of(b"aa"), 8.0)
    assert trie.match(keys_of(b"aa"), 17.9) == {"r1": 2}
    assert trie.match(keys_of(b"aa"), 18.0) == {}, "matches do not see what is past its time, swept or not"
    trie.expire(18.0)
    assert (trie.blocks, trie.size_bytes) == (0, 0)
    assert trie.evicted["ttl"] == 2


def test_an_insert_enforces_time_to_live_without_a_sweep() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"aa"), 0.0)
    trie.insert("r1", keys_of(b"b"), 50.0)
    assert trie.held() == {"r1": 1}


def test_a_prompt_longer_than_the_capacity_keeps_its_head() -> None:
    trie = trie_with("r1", capacity=3)
    trie.insert("r1", keys_of(b"abcdefgh"), 0.0)
    assert trie.match(keys_of(b"abcdefgh"), 0.0) == {"r1": 3}
    assert trie.evicted["capacity"] == 5


def test_the_memory_bound_holds_under_hostile_prompts() -> None:
    """A million-block flood in small: distinct one-block prompts, long ones, heads that differ late, forced splits."""
    chance = random.Random(1)
    bound = 200_000
    trie = trie_with("r1", "r2", max_bytes=bound)
    head = chance.randbytes(400)
    for turn in range(3000):
        kind = turn % 4
        if kind == 0:
            prompt = chance.randbytes(8)
        elif kind == 1:
            prompt = head[: chance.randrange(400)] + chance.randbytes(3)
        elif kind == 2:
            prompt = head
        else:
            prompt = chance.randbytes(3000 if turn % 100 == 3 else 40)
        trie.insert(chance.choice(["r1", "r2"]), keys_of(prompt), float(turn) / 1000)
        assert trie.size_bytes <= bound
    trie.check()
    assert trie.evicted["memory"] > 0
    assert trie.match(keys_of(head), 3.0), "what is used all the time survives the flood"


def test_one_prompt_beyond_the_memory_bound_leaves_nothing_broken() -> None:
    trie = trie_with("r1", max_bytes=5000)
    trie.insert("r1", keys_of(bytes(10_000)), 0.0)
    trie.check()
    assert trie.size_bytes <= 5000


@pytest.mark.parametrize(("prompts", "holders"), [(400, 1), (400, 4)])
def test_the_memory_estimate_is_honest(prompts: int, holders: int) -> None:
    names = [f"r{index}" for index in range(holders)]
    keys = [keys_of(random.Random(index).randbytes(40)) for index in range(prompts)]
    gc.collect()
    tracemalloc.start()
    trie = trie_with(*names, ttl=1e9)
    for item in keys:
        for name in names:
            trie.insert(name, bytes(bytearray(item)), 0.0)
    del item
    gc.collect()
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.7 * measured < trie.size_bytes < 1.5 * measured


def test_what_is_forgotten_is_freed_at_once() -> None:
    """Not by a garbage collection: compiled code keeps the tree out of its sight."""
    chance = random.Random(5)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        trie = trie_with("r1", "r2", "r3", ttl=3.0)
        for turn in range(4000):
            name, prompt = chance.choice(["r1", "r2", "r3"]), bytes(chance.choices(b"ab", k=chance.randint(1, 40)))
            trie.insert(name, keys_of(prompt), turn / 1000)
            if turn % 50 == 0:
                trie.forget(name, keys_of(prompt), chance.randint(0, 2))
            if turn % 500 == 0:
                trie.remove_replica(name)
                trie.add_replica(name, chance.choice([None, 200]))
        full = tracemalloc.get_traced_memory()[0]
        for name in ("r1", "r2", "r3"):
            trie.remove_replica(name)
        assert tracemalloc.get_traced_memory()[0] < full / 10, "what is left is the test's own"
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_deep_tree_is_forgotten_in_one_go() -> None:
    trunk = random.Random(6).randbytes(400)
    trie = trie_with("r1", "r2", ttl=1e9)
    for turn in range(1, len(trunk)):  # a branch at each block
        for name in ("r1", "r2"):
            trie.insert(name, keys_of(trunk[:turn] + bytes([trunk[turn] ^ 1])), float(turn))
    assert trie.held() == {"r1": 798, "r2": 798}
    trie.forget("r1", keys_of(trunk), 0)
    trie.check()
    trie.purge("r2")
    trie.check()
    assert trie.size_bytes == 0


def test_unknown_replicas_are_ignored() -> None:
    trie = trie_with("r1")
    assert trie.insert("gone", keys_of(b"aa"), 0.0) is None
    trie.forget("gone", keys_of(b"aa"), 0)
    assert (trie.room("gone", 5), trie.used_since("gone", -1.0), trie.held_by("gone")) == ((0, 0.0), 0, 0)
    trie.purge("gone")
    trie.remove_replica("gone")
    trie.check()
    assert trie.match(keys_of(b"aa"), 0.0) == {}


def test_an_insert_says_how_long_what_it_found_had_not_been_used() -> None:
    trie = trie_with("r1", ttl=100.0)
    assert trie.insert("r1", keys_of(b"aabb"), 0.0) is None
    assert trie.insert("r1", keys_of(b"aa"), 6.0) == 6.0
    assert trie.insert("r1", keys_of(b"aabbcc"), 10.0) == 10.0, "the deepest block, not the freshest"
    assert trie.insert("r1", keys_of(b"aax"), 5.0) == 0.0, "a clock that goes back stands still"
    assert trie.insert("r1", b"", 20.0) is None
    assert trie.insert("r1", keys_of(b"aabb"), 200.0) is None, "past its time it counts as not there"


def test_the_room_of_a_replica_is_what_it_would_have_to_forget() -> None:
    trie = trie_with("r1", capacity=6)
    assert trie.room("r1", 9) == (0, 0.0), "an empty replica forgets nothing, whatever comes"
    trie.insert("r1", keys_of(b"aabb"), 1.0)
    trie.insert("r1", keys_of(b"aa"), 2.0)
    assert [trie.room("r1", blocks) for blocks in (0, 2, 3, 9)] == [(0, 1.0), (0, 1.0), (1, 1.0), (7, 1.0)]
    trie.add_replica("r1", None)
    assert trie.room("r1", 9) == (0, 0.0)


def test_what_was_used_since_is_counted_in_blocks() -> None:
    trie = trie_with("r1", ttl=100.0)
    for now, prompt in enumerate((b"aabb", b"aa", b"xyz")):
        trie.insert("r1", keys_of(prompt), float(now))
    assert [trie.used_since("r1", since) for since in (-1.0, 0.0, 1.0, 2.0)] == [7, 5, 3, 0]


def test_the_lifetime_is_how_long_blocks_go_unused_before_they_must_go() -> None:
    trie = trie_with("r1", "r2", capacity=4, ttl=1e6)
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    assert trie.lifetime is None, "there was room"
    trie.insert("r1", keys_of(b"bb"), 30.0)
    assert trie.lifetime is not None
    assert trie.lifetime.value == 30.0, "two blocks of a went"
    for turn in range(40):
        trie.insert("r2", keys_of(bytes([turn]) * 4), 100.0 + 5.0 * turn)
    assert trie.lifetime.value == pytest.approx(5.0, rel=0.05), "of late"


def test_the_lifetime_weighs_blocks_and_not_evictions() -> None:
    trie = trie_with("r1", capacity=1000, ttl=1e6)
    trie.insert("r1", keys_of(bytes([1]) * 990), 0.0)
    trie.insert("r1", keys_of(bytes([2]) * 10), 90.0)
    trie.insert("r1", keys_of(bytes([3]) * 990), 100.0)  # 990 blocks were idle for 100 s
    trie.insert("r1", keys_of(bytes([4]) * 10), 110.0)  # 10 blocks for 20 s
    kept = 990 * 0.5 ** (10 / 1000)
    assert trie.lifetime is not None
    assert trie.lifetime.value == pytest.approx((100.0 * kept + 20.0 * 10) / (kept + 10))


def test_a_cache_that_is_turned_over_within_an_instant_has_a_lifetime_that_can_be_divided_by() -> None:
    trie = trie_with("r1", capacity=2)
    for turn in range(100):
        trie.insert("r1", keys_of(bytes([turn]) * 2), 7.0)
    assert trie.lifetime is not None
    assert trie.lifetime.value == pytest.approx(1e-3)


def test_only_a_want_of_room_teaches_a_lifetime() -> None:
    trie = trie_with("r1", max_bytes=2000)
    for turn in range(50):
        trie.insert("r1", keys_of(bytes([turn]) * 4), float(turn))
    trie.expire(48.0 + TTL)
    trie.purge("r1")
    assert min(trie.evicted[reason] for reason in ("ttl", "memory", "purge")) > 0
    assert trie.lifetime is None
