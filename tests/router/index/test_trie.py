"""The trie against a plain oracle: one pygtrie per replica, one entry per block, evicted one by one."""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from typing import NamedTuple

import pygtrie
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from router.index.blocks import text_keys
from router.index.holds import Hold, reuse_chance
from router.index.tree import MAX_EDGES
from router.index.trie import MAX_COUNTED, MAX_PRICED, SWEEP_HOLDS, RadixTrie
from router.types import KEY_BYTES
from tests.support.machines import STEPS, CountedMachine, steps_of
from tests.support.strategies import keys_of, letters, replicas

TTL = 10.0
PLENTY = 1 << 30
weights = st.sampled_from([1, 1, 3, 7])  # of a block


class Block(NamedTuple):
    """One block of one replica. touch: the number of the insert that used it last."""

    touch: int
    used: float
    confirmed: bool
    weight: int


class Oracle:
    """What the trie means, with no compression and no cleverness: every block of every replica is one pygtrie entry."""

    def __init__(self) -> None:
        self.now = float("-inf")
        self.touches = 0
        self.held: dict[str, pygtrie.Trie] = {}
        self.capacity: dict[str, int | None] = {}
        self.backed: dict[str, int] = {}

    def add(self, replica: str, capacity: int | None) -> None:
        self.held.setdefault(replica, pygtrie.Trie())
        self.capacity[replica] = capacity

    def purge(self, replica: str) -> None:
        if self.held.get(replica):
            self.held[replica].clear()
            self.now = math.nextafter(self.now, math.inf)

    def insert(self, replica: str, prompt: bytes, now: float, confirmed: bool = True, weight: int = 1) -> float | None:
        if replica not in self.held:
            return None
        self.now = max(self.now, now)
        self.touches += 1
        self.expire(replica)
        held, prompt = self.held[replica], prompt[: self.fits(replica, weight)]
        deepest = held.longest_prefix(prompt)
        idle = self.now - deepest.value.used if deepest else None
        for end in range(1, len(prompt) + 1):
            known = held.get(prompt[:end])
            firm = confirmed or (known is not None and known.confirmed)
            held[prompt[:end]] = Block(self.touches, self.now, firm, weight)
        self.shrink(replica)
        return idle

    def fits(self, replica: str, weight: int) -> int | None:
        """Blocks of this weight that a replica can hold; None: any number."""
        capacity = self.capacity[replica]
        return None if capacity is None else capacity // weight

    def weigh(self, replica: str, prompt: bytes, weight: int) -> None:
        held, path = self.held.get(replica, pygtrie.Trie()), {prompt[:end] for end in range(1, len(prompt) + 1)}
        begun = [(name, bytes(key)) for name, keys in self.held.items() for key in keys if bytes(key)[:1] == prompt[:1]]
        if {key for _, key in begun} == path and {name for name, _ in begun} == {replica}:
            for key in path:
                held[key] = held[key]._replace(weight=weight)

    def weight_of(self, prompt: bytes) -> int | None:
        """What a block weighs of whatever begins as this prompt does; None if nobody holds such a thing."""
        known = (held.get(prompt[:1]) for held in self.held.values() if prompt)
        return next((block.weight for block in known if block), None)

    def confirm(self, replica: str, prompt: bytes, now: float, creditable: int, weight: int) -> None:
        if replica not in self.held:
            return
        held = self.held[replica]
        self.expire(replica, max(self.now, now))
        if not held.has_key(prompt):
            self.insert(replica, prompt[:creditable], now, weight=weight)
            return
        self.now = max(self.now, now)
        for end in range(1, len(prompt) + 1):
            held[prompt[:end]] = held[prompt[:end]]._replace(confirmed=True)
        self.shrink(replica)

    def take_back(self, replica: str, prompt: bytes, keep: int = 0) -> None:
        if replica not in self.held:
            return
        held = self.held[replica]
        self.expire(replica)
        for end in range(len(prompt), keep, -1):
            block = prompt[:end]
            if held.has_subtrie(block):
                return
            if held.has_key(block):
                if held[block].confirmed:
                    return
                del held[block]

    def expire(self, replica: str, now: float = float("-inf")) -> None:
        for key, block in list(self.held[replica].items()):
            if block.used <= max(self.now, now) - TTL:
                del self.held[replica][key]

    def shrink(self, replica: str) -> None:
        """From the stale end, what is pending too, until what is confirmed fits."""
        held, capacity = self.held[replica], self.capacity[replica]
        while capacity is not None and self.confirmed(replica) > capacity:
            del held[min(held, key=lambda block: (held[block].touch, -len(block)))]

    def confirmed(self, replica: str) -> int:
        return sum(block.weight for block in self.held[replica].values() if block.confirmed)

    def weight(self, replica: str) -> int:
        return sum(block.weight for block in self.held[replica].values())

    def burden(self, replica: str) -> int:
        """What counts against the capacity."""
        confirmed = self.confirmed(replica)
        return confirmed + min(self.weight(replica) - confirmed, self.backed.get(replica, 0))

    def eviction_loss(self, replica: str, weight: int, now: float, lifetime_s: float) -> float:
        held, capacity = self.held.get(replica), self.capacity.get(replica)
        if not held or capacity is None:
            return 0.0
        stalest = sorted(held, key=lambda block: (held[block].touch, -len(block)))
        excess, loss, chance = max(0, min(self.burden(replica), capacity) + weight - capacity), 0.0, 1.0
        for key in stalest[len(self.doomed(replica)) :]:
            if excess:
                chance = reuse_chance(now - held[key].used, lifetime_s)
                loss += chance * min(excess, held[key].weight)
                excess = max(0, excess - held[key].weight)
        return loss + chance * excess

    def doomed(self, replica: str) -> list[tuple[int, ...]]:
        """What will have to go for what is pending, as far as that is half of the capacity."""
        held, capacity = self.held[replica], self.capacity[replica]
        if capacity is None:
            return []
        doomed, weight, excess = [], 0, self.burden(replica) - capacity
        for key in sorted(held, key=lambda block: (held[block].touch, -len(block))):
            if weight >= excess or weight + held[key].weight > capacity // 2:
                break
            weight += held[key].weight
            doomed.append(key)
        return doomed

    def used_since(self, replica: str, since: float, *, confirmed: bool) -> int:
        used = [block for block in self.held.get(replica, pygtrie.Trie()).values() if block.used > since]
        return sum(block.weight for block in used if block.confirmed or not confirmed)

    def match(self, prompt: bytes, now: float) -> dict[str, int]:
        alive = max(self.now, now) - TTL
        found = {}
        for replica, held in self.held.items():
            doomed = self.doomed(replica)
            blocks = sum(1 for step in held.prefixes(prompt) if step.value.used > alive and tuple(step.key) not in doomed)
            if blocks:
                found[replica] = blocks
        return found


class TrieMachine(CountedMachine):
    """The trie with its bounds: exact at every step, where an insert may drop all that it has to."""

    @initialize()
    def start(self) -> None:
        self.begin(RadixTrie(TTL, PLENTY, insert_holds=10**6))
        for replica, capacity in (("r1", None), ("r2", 18)):
            self.add(replica, capacity)

    def begin(self, trie: RadixTrie) -> None:
        self.trie, self.oracle, self.now = trie, Oracle(), 0.0
        self.prompts: set[bytes] = {b""}
        self.tails: dict[tuple[str, bytes], Hold | None] = {}

    @rule(replica=replicas, capacity=st.none() | st.integers(0, 40))
    def add(self, replica: str, capacity: int | None) -> None:
        self.trie.add_replica(replica, capacity)
        self.oracle.add(replica, capacity)
        self.sweep()

    @rule(replica=replicas)
    def remove(self, replica: str) -> None:
        self.trie.remove_replica(replica)
        self.oracle.purge(replica)
        self.oracle.held.pop(replica, None)
        self.oracle.backed.pop(replica, None)

    @rule(replica=replicas)
    def purge(self, replica: str) -> None:
        self.trie.purge(replica)
        self.oracle.purge(replica)

    @rule(replica=replicas, prompt=letters, confirmed=st.booleans(), weight=weights)
    def insert(self, replica: str, prompt: bytes, confirmed: bool, weight: int) -> None:
        self.prompts.add(prompt)
        weighs = self.weighs(prompt, weight)
        idle = self.trie.insert(replica, keys_of(prompt), self.now, weight=weight, confirmed=confirmed)
        self.tails[replica, prompt] = self.trie.tail
        credited = prompt[: self.trie.credited]
        assert idle == self.oracle.insert(replica, credited, self.now, confirmed, weighs)
        assert self.is_all(replica, prompt, credited, weighs)

    def weighs(self, prompt: bytes, weight: int) -> int:
        """What a block of the prompt weighs: as much as what it continues, which may be in the trie although nobody holds it
        any more (it was not dropped yet).
        """
        weighs = self.trie.weight_of(keys_of(prompt), weight)
        assert weighs == (self.oracle.weight_of(prompt) or weighs)
        return weighs

    def is_all(self, replica: str, prompt: bytes, credited: bytes, weight: int) -> bool:
        """Whether no more of a prompt could be credited; where paths are short, that is not asked."""
        if self.trie.max_edges < MAX_EDGES or replica not in self.oracle.held:
            return True
        return credited == prompt[: self.oracle.fits(replica, weight)]

    @rule(data=st.data(), replica=replicas, more=letters, confirmed=st.booleans(), weight=weights)
    def extend(self, data: st.DataObject, replica: str, more: bytes, confirmed: bool, weight: int) -> None:
        """The next turn of a conversation, the case that the tree is made for."""
        self.insert(replica, data.draw(st.sampled_from(sorted(self.prompts))) + more, confirmed, weight)

    @rule(data=st.data(), replica=replicas, weight=weights)
    def confirm(self, data: st.DataObject, replica: str, weight: int) -> None:
        prompt = data.draw(st.sampled_from(sorted(self.prompts)))
        self.trie.credited = len(prompt)
        tail = self.tails.get((replica, prompt)) if data.draw(st.booleans()) else None
        weighs = self.weighs(prompt, weight)
        self.trie.confirm(replica, keys_of(prompt), self.now, tail, weight=weight)
        self.oracle.confirm(replica, prompt, self.now, self.trie.credited, weighs)

    @rule(data=st.data(), replica=replicas, keep=st.integers(0, 12))
    def take_back(self, data: st.DataObject, replica: str, keep: int) -> None:
        """Once nothing is left that was to be dropped: else it may keep what that hangs on."""
        self.drop_all()
        prompt = data.draw(st.sampled_from(sorted(self.prompts)))
        self.trie.take_back(replica, keys_of(prompt), keep)
        self.oracle.take_back(replica, prompt, keep)

    @rule(replica=replicas, weight=st.integers(0, 40))
    def back(self, replica: str, weight: int) -> None:
        self.trie.back(replica, weight)
        if replica in self.oracle.held:
            self.oracle.backed[replica] = weight
        self.sweep()

    @rule(data=st.data(), replica=replicas, weight=weights)
    def weigh(self, data: st.DataObject, replica: str, weight: int) -> None:
        """Only if the replica alone holds the prompt, and nothing else of its path."""
        self.drop_all()
        prompt = data.draw(st.sampled_from(sorted(self.prompts)))
        self.trie.weigh(replica, keys_of(prompt), weight)
        if prompt:
            self.oracle.weigh(replica, prompt, weight)
        self.sweep()

    @rule(replica=replicas, prompt=letters, weight=weights)
    def take_back_too_early(self, replica: str, prompt: bytes, weight: int) -> None:
        """While there is something to be dropped; what is then kept is dropped with it."""
        self.insert(replica, prompt, False, weight)
        self.trie.take_back(replica, keys_of(prompt))
        self.trie.check()
        self.drop_all()
        self.trie.take_back(replica, keys_of(prompt))
        self.oracle.take_back(replica, prompt)

    @rule(data=st.data(), replica=replicas, length=st.integers(1, 9), confirmed=st.booleans(), weight=weights)
    def shorten(self, data: st.DataObject, replica: str, length: int, confirmed: bool, weight: int) -> None:
        """The head of a known prompt is used again, without its tail."""
        self.insert(replica, data.draw(st.sampled_from(sorted(self.prompts)))[:length], confirmed, weight)

    @rule(seconds=st.sampled_from([-3.0, 0.5, 4.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.drop_all()

    def drop_all(self) -> None:
        while self.trie.sweep(self.now, 3):
            self.trie.check()
        self.oracle.now = max(self.oracle.now, self.now)
        for replica in self.oracle.held:
            self.oracle.expire(replica)
            self.oracle.shrink(replica)

    @rule(replica=replicas, weight=st.integers(0, 50), later=st.sampled_from([0.0, 3.0]))
    def eviction_loss(self, replica: str, weight: int, later: float) -> None:
        self.sweep()
        now, lifetime = self.now + later, self.trie.lifetime
        expected = self.oracle.eviction_loss(replica, weight, now, lifetime.value) if lifetime else 0.0
        assert self.trie.eviction_loss(replica, weight, now) == pytest.approx(expected)

    @rule(replica=replicas, back=st.sampled_from([-1.0, 0.0, 0.5, 4.0, 5.0, 30.0]), confirmed=st.booleans())
    def used_since(self, replica: str, back: float, confirmed: bool) -> None:
        self.sweep()
        used = self.trie.used_since(replica, self.now - back, confirmed=confirmed)
        assert used == self.oracle.used_since(replica, self.now - back, confirmed=confirmed)

    @rule(prompt=letters)
    def match(self, prompt: bytes) -> None:
        assert self.trie.match(keys_of(prompt), self.now) == self.oracle.match(prompt, self.now)

    @rule()
    def holds_as_much(self) -> None:
        """What has expired or is dead is counted until it is dropped."""
        self.sweep()
        assert self.trie.held() == {replica: len(held) for replica, held in self.oracle.held.items()}
        assert self.trie.blocks == sum(self.trie.held_by(replica) for replica in self.oracle.held)
        for replica in self.oracle.held:
            assert self.trie.weight_held_by(replica) == self.oracle.weight(replica)
            assert self.trie.weight_held_by(replica) - self.trie.pending_of(replica) == self.oracle.confirmed(replica)

    @invariant()
    def agrees(self) -> None:
        self.trie.check()
        for prompt in self.prompts:
            assert self.trie.match(keys_of(prompt), self.now) == self.oracle.match(prompt, self.now)


class ShallowTrieMachine(TrieMachine):
    """The same where paths have three edges at most: a prompt is credited as far as that goes."""

    @initialize()
    def start(self) -> None:
        self.begin(RadixTrie(TTL, PLENTY, max_edges=3, insert_holds=10**6))
        for replica in ("r1", "r2"):
            self.add(replica, None)


class SlowTrieMachine(TrieMachine):
    """The same where an insert drops one hold, and nothing else does: nobody sees what is still to be dropped."""

    @initialize()
    def start(self) -> None:
        self.begin(RadixTrie(TTL, PLENTY, insert_holds=1))
        for replica in ("r1", "r2"):
            self.add(replica, None)

    @rule(replica=replicas)
    def add(self, replica: str, capacity: None = None) -> None:  # type: ignore[override]
        """Unbounded: what is beyond a capacity is seen until it is dropped."""
        self.trie.add_replica(replica, None)
        self.oracle.add(replica, None)

    @rule()
    def sweep(self) -> None:
        """Only by the rules that count."""

    @rule()
    def eviction_loss(self) -> None:  # type: ignore[override]
        """Counts what is still to be dropped."""

    @rule()
    def used_since(self) -> None:  # type: ignore[override]
        """The same."""

    @rule()
    def holds_as_much(self) -> None:
        self.drop_all()
        assert self.trie.held() == {replica: len(held) for replica, held in self.oracle.held.items()}


@pytest.mark.parametrize("machine", [TrieMachine, ShallowTrieMachine, SlowTrieMachine])
def test_the_trie_and_its_oracle_agree_at_every_step(machine: type[TrieMachine]) -> None:
    assert steps_of(machine, examples=280, steps=50) >= STEPS


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
    assert not trie.sweep(0.0)
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


def test_a_prompt_that_is_taken_back_leaves_what_was_there_and_what_others_have_added() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"aa"), 0.0)
    for prompt in (b"aabb", b"aacc", b"aabbdd"):
        trie.insert("r1", keys_of(prompt), 0.0, confirmed=False)
    trie.take_back("r1", keys_of(b"aabb"))
    assert trie.match(keys_of(b"aabbdd"), 0.0) == {"r1": 6}, "the third goes on from there"
    trie.take_back("r1", keys_of(b"aabbdd"))
    assert trie.match(keys_of(b"aabbdd"), 0.0) == {"r1": 2}
    assert trie.match(keys_of(b"aacc"), 0.0) == {"r1": 4}, "another branch"
    trie.confirm("r1", keys_of(b"aacc"), 0.0)
    trie.take_back("r1", keys_of(b"aacc"))
    assert trie.match(keys_of(b"aacc"), 0.0) == {"r1": 4}, "it was computed"
    assert trie.evicted["correction"] == 4


def test_two_prompts_with_a_common_head_that_are_both_refused_leave_nothing() -> None:
    for first, second in ((b"aabb", b"aacc"), (b"aacc", b"aabb"), (b"aabb", b"aa"), (b"aa", b"aabb")):
        trie = trie_with("r1")
        for prompt in (b"aabb", b"aacc", b"aa"):
            trie.insert("r1", keys_of(prompt), 0.0, confirmed=False)
        for prompt in (first, second, *{b"aabb", b"aacc", b"aa"} - {first, second}):
            trie.take_back("r1", keys_of(prompt))
        assert (trie.held_by("r1"), trie.pending_of("r1"), trie.size_bytes) == (0, 0, 0)


def test_what_is_pending_evicts_nothing_until_it_is_confirmed() -> None:
    trie = trie_with("r1", capacity=6)
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r1", keys_of(b"bbbbbb"), 1.0, confirmed=False)
    trie.insert("r1", keys_of(b"cc"), 2.0, confirmed=False)
    assert (trie.held_by("r1"), trie.pending_of("r1")) == (12, 8)
    trie.confirm("r1", keys_of(b"cc"), 3.0)
    assert trie.held_by("r1") == 12, "just six are confirmed"
    trie.confirm("r1", keys_of(b"bbbbbb"), 4.0)
    assert trie.match(keys_of(b"aaaa"), 4.0) == {}
    assert (trie.held_by("r1"), trie.pending_of("r1")) == (6, 0)


def test_a_pending_credit_that_was_evicted_meanwhile_is_credited_again() -> None:
    trie = trie_with("r1", capacity=4)
    trie.insert("r1", keys_of(b"aa"), 0.0, confirmed=False)
    for turn in range(4):
        trie.insert("r1", keys_of(bytes([turn]) * 4), 1.0 + turn)
    assert trie.match(keys_of(b"aa"), 5.0) == {}, "it waited for longer than all else was used"
    trie.confirm("r1", keys_of(b"aa"), 6.0)
    assert trie.match(keys_of(b"aa"), 6.0) == {"r1": 2}


def test_pending_credits_have_a_share_of_the_memory_and_what_does_not_fit_is_not_credited() -> None:
    bound = 160_000
    trie = trie_with("r1", max_bytes=bound)
    for number in range(2000):
        trie.insert("r1", keys_of(number.to_bytes(2, "big") * 5), 0.0)
    full, evicted = trie.size_bytes, trie.evicted["memory"]
    assert bound * 0.9 < full <= bound * 15 // 16
    reserved = []
    for number in range(2000):
        trie.insert("r1", keys_of(number.to_bytes(2, "little") * 5 + b"pending"), 1.0, confirmed=False)
        reserved.append(trie.reserved)
        assert trie.size_bytes <= bound
    assert trie.evicted["memory"] == evicted, "they evict nothing"
    assert sum(reserved) == trie.pending_bytes <= bound // 16
    assert 0 < sum(map(bool, reserved)) < 40
    trie.insert("r1", keys_of(b"confirmed"), 2.0)
    assert trie.size_bytes <= bound
    assert trie.match(keys_of(b"confirmed"), 2.0) == {"r1": 9}
    trie.check()


def test_a_path_has_no_more_edges_than_it_may_and_a_victim_keeps_its_match() -> None:
    """A prompt that splits another at every block costs every decision on it."""
    trunk = random.Random(7).randbytes(1000)
    trie = trie_with("victim", "attacker", ttl=1e9)
    trie.insert("victim", keys_of(trunk), 0.0)
    for at in random.Random(8).sample(range(1, 1000), 999):
        trie.insert("attacker", keys_of(trunk[:at] + bytes([trunk[at] ^ 1, 1])), 1.0)
    trie.check()  # which asserts it
    assert len(trie._walk(keys_of(trunk))[0]) == MAX_EDGES
    assert trie.match(keys_of(trunk), 2.0)["victim"] == 1000
    trie.insert("victim", keys_of(trunk + b"next turn"), 2.0)
    assert trie.match(keys_of(trunk + b"next turn"), 2.0)["victim"] == 1009


def test_a_path_that_had_too_many_edges_is_cut_again_once_they_are_gone() -> None:
    trunk = random.Random(7).randbytes(600)
    trie = trie_with("victim", "attacker", ttl=1e9)
    trie.insert("victim", keys_of(trunk), 0.0)
    for at in range(599, 0, -1):
        trie.insert("attacker", keys_of(trunk[:at] + bytes([trunk[at] ^ 1, 1])), 1.0)
    trie.remove_replica("attacker")
    while trie.sweep(2.0):
        trie.check()
    assert repr(trie).startswith("<RadixTrie 1 nodes")
    trie.insert("victim", keys_of(trunk[:300] + b"x"), 3.0)
    assert trie.match(keys_of(trunk[:300] + b"x"), 3.0) == {"victim": 301}


def test_what_was_used_last_above_a_purged_prompt_can_expire() -> None:
    """A pending credit drops what is past its time: not before what is dead below it."""
    trie = trie_with("r1")
    prompt = keys_of(b"ab")
    trie.insert("r1", prompt, 0.0)
    trie.purge("r1")
    trie.insert("r1", prompt[:KEY_BYTES], 1.0, confirmed=False)
    trie.insert("r1", keys_of(b"x"), 20.0, confirmed=False)
    trie.check()
    assert (trie.match(prompt, 20.0), trie.held_by("r1")) == ({}, 1)


def test_a_purge_is_over_at_once_and_its_holds_are_reclaimed_slice_by_slice() -> None:
    trie = trie_with("r1", "r2", ttl=1e9)
    prompts = [keys_of(number.to_bytes(3, "big")) for number in range(5000)]
    for keys in prompts:
        trie.insert("r1", keys, 0.0)
        trie.insert("r2", keys, 0.0)
    full = trie.size_bytes
    trie.purge("r1")
    assert (trie.held_by("r1"), trie.size_bytes, trie.evicted["purge"] > 5000) == (0, full, True), "nothing is freed yet"
    assert {replica for keys in prompts for replica in trie.match(keys, 0.0)} == {"r2"}
    assert trie.insert("r1", prompts[7], 0.0) is None, "it held nothing of it"
    assert trie.match(prompts[7], 0.0) == {"r1": 3, "r2": 3}
    before = trie._holds
    slices = 0
    while trie.sweep(0.0):
        assert before - trie._holds <= SWEEP_HOLDS
        before, slices = trie._holds, slices + 1
    assert slices >= 5
    assert trie.match(prompts[7], 0.0) == {"r1": 3, "r2": 3}
    trie.check()


def test_a_replica_that_comes_back_under_its_name_gets_nothing_of_what_it_held() -> None:
    trie = trie_with("r1", ttl=1e9)
    for number in range(200):
        trie.insert("r1", keys_of(bytes([number]) * 3), 0.0)
    trie.remove_replica("r1")
    trie.add_replica("r1")
    assert trie.held() == {"r1": 0}
    trie.insert("r1", keys_of(bytes([1]) * 2), 0.0)
    assert [trie.match(keys_of(bytes([number]) * 3), 0.0) for number in (0, 1)] == [{}, {"r1": 2}]
    trie.remove_replica("r1")
    trie.check()
    while trie.sweep(0.0, 7):
        trie.check()
    assert trie.size_bytes == 0


@pytest.mark.parametrize("what", ["ttl", "capacity"])
def test_a_bound_that_was_lowered_is_enforced_slice_by_slice(what: str) -> None:
    trie = trie_with("r1", ttl=1e9)
    for number in range(3000):
        trie.insert("r1", keys_of(number.to_bytes(2, "big")), float(number))
    before = trie.held_by("r1")
    if what == "ttl":
        trie.ttl_s = 10.0
    else:
        trie.add_replica("r1", 20)
    trie.insert("r1", keys_of(b"next"), 3000.0)
    assert before - trie.held_by("r1") < 40, "an insert does no more than a little"
    while trie.sweep(3000.0):
        trie.check()
    assert trie.held_by("r1") <= 24
    assert trie.match(keys_of(b"next"), 3000.0) == {"r1": 4}


def test_too_much_to_count_is_not_counted() -> None:
    trie = trie_with("r1", ttl=1e9)
    for number in range(MAX_COUNTED + 1):
        trie.insert("r1", keys_of(b"x" + number.to_bytes(2, "big")), float(number))
    assert trie.used_since("r1", MAX_COUNTED - 10.0, confirmed=False) == 1 + 2 + 10
    assert trie.used_since("r1", -1.0, confirmed=False) is None


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
    trie.sweep(18.0)
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
    assert trie.credited == 3
    assert trie.evicted["capacity"] == 0, "it never held more"


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
            trie.insert(name, keys_of(prompt), turn / 1000, confirmed=turn % 3 > 0)
            if turn % 50 == 0:
                trie.take_back(name, keys_of(prompt))
            if turn % 500 == 0:
                trie.remove_replica(name)
                trie.add_replica(name, chance.choice([None, 200]))
        full = tracemalloc.get_traced_memory()[0]
        for name in ("r1", "r2", "r3"):
            trie.remove_replica(name)
        while trie.sweep(4.0):
            pass
        assert tracemalloc.get_traced_memory()[0] < full / 10, "what is left is the test's own"
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_deep_tree_is_forgotten_whole() -> None:
    trunk = random.Random(6).randbytes(400)
    trie = RadixTrie(1e9, PLENTY, max_edges=1000)
    trie.add_replica("r1")
    trie.add_replica("r2")
    for turn in range(1, len(trunk)):  # a branch at each block
        for name in ("r1", "r2"):
            trie.insert(name, keys_of(trunk[:turn] + bytes([trunk[turn] ^ 1])), float(turn))
    assert trie.held() == {"r1": 798, "r2": 798}
    trie.purge("r1")
    trie.check()
    trie.remove_replica("r2")
    trie.check()
    assert not trie.sweep(400.0, 10**6)
    trie.check()
    assert trie.size_bytes == 0


def test_unknown_replicas_are_ignored() -> None:
    trie = trie_with("r1")
    assert trie.insert("gone", keys_of(b"aa"), 0.0) is None
    trie.take_back("gone", keys_of(b"aa"))
    trie.confirm("gone", keys_of(b"aa"), 0.0)
    assert trie.pending_of("gone") == trie.weight_held_by("gone") == 0
    trie.restore_lifetime((1.0, 1.0), 1.0)
    assert trie.eviction_loss("gone", 5, 1.0) == 0.0
    assert (trie.used_since("gone", -1.0, confirmed=True), trie.held_by("gone")) == (0, 0)
    trie.purge("gone")
    trie.remove_replica("gone")
    trie.check()
    assert trie.match(keys_of(b"aa"), 0.0) == {}


def test_an_insert_returns_how_long_what_it_found_had_not_been_used() -> None:
    trie = trie_with("r1", ttl=100.0)
    assert trie.insert("r1", keys_of(b"aabb"), 0.0) is None
    assert trie.insert("r1", keys_of(b"aa"), 6.0) == 6.0
    assert trie.insert("r1", keys_of(b"aabbcc"), 10.0) == 10.0, "the deepest block, not the freshest"
    assert trie.insert("r1", keys_of(b"aax"), 5.0) == 0.0, "a clock that goes back stands still"
    assert trie.insert("r1", b"", 20.0) is None
    assert trie.insert("r1", keys_of(b"aabb"), 200.0) is None, "past its time it counts as not there"


def test_the_loss_by_evictions_is_of_each_block_by_its_own_last_use() -> None:
    trie = trie_with("r1", capacity=6)
    trie.restore_lifetime((10.0, 1.0), 1.0)  # 10 s
    assert trie.eviction_loss("r1", 9, 2.0) == 0.0, "an empty replica forgets nothing, whatever comes"
    trie.insert("r1", keys_of(b"aabb"), 1.0)
    trie.insert("r1", keys_of(b"aa"), 6.0)
    old, new = math.exp(-1.0), math.exp(-0.5)
    losses = [trie.eviction_loss("r1", weight, 11.0) for weight in (0, 2, 3, 5, 9)]
    assert losses == pytest.approx([0, 0, old, 2 * old + new, 2 * old + 5 * new]), "beyond all blocks, like the last one"
    trie.add_replica("r1", None)
    assert trie.eviction_loss("r1", 9, 11.0) == 0.0


def test_blocks_that_pending_prompts_will_evict_are_no_loss_of_a_later_one() -> None:
    trie = trie_with("r1", capacity=4)
    trie.restore_lifetime((10.0, 1.0), 1.0)
    trie.insert("r1", keys_of(b"aa"), 1.0)
    trie.insert("r1", keys_of(b"bb"), 6.0)
    trie.back("r1", 2)
    trie.insert("r1", keys_of(b"cc"), 7.0, confirmed=False)
    assert trie.eviction_loss("r1", 1, 11.0) == pytest.approx(math.exp(-0.5))


def test_the_loss_by_evictions_looks_at_few_prompts() -> None:
    trie = trie_with("r1", capacity=4 * MAX_PRICED)
    trie.restore_lifetime((1.0, 1.0), 1.0)
    for number in range(4 * MAX_PRICED):
        trie.insert("r1", keys_of(bytes([number])), float(number))
    seen = sum(math.exp(number - 4 * MAX_PRICED) for number in range(MAX_PRICED))
    last = math.exp(MAX_PRICED - 1 - 4 * MAX_PRICED)
    assert trie.eviction_loss("r1", 2 * MAX_PRICED, 4.0 * MAX_PRICED) == pytest.approx(seen + MAX_PRICED * last)


def test_blocks_of_different_lengths_share_one_capacity() -> None:
    """Text in blocks of 64 tokens, token ids in blocks of 16: what one evicts of the other is as long as it is itself."""
    trie = trie_with("r1", capacity=640)
    trie.insert("r1", keys_of(b"abcdefgh"), 0.0, weight=64)
    trie.insert("r1", keys_of(b"xyz12345"), 1.0, weight=16)
    assert (trie.held_by("r1"), trie.weight_held_by("r1")) == (16, 640), "all of it fits"
    trie.insert("r1", keys_of(b"0"), 2.0, weight=16)
    assert trie.match(keys_of(b"abcdefgh"), 2.0) == {"r1": 7}, "a whole block has to go for a quarter of one"
    trie.insert("r1", keys_of(b"9876"), 3.0, weight=16)
    assert (trie.match(keys_of(b"abcdefgh"), 3.0), trie.weight_held_by("r1")) == ({"r1": 6}, 6 * 64 + 13 * 16)


def test_what_continues_a_prompt_weighs_what_that_weighs_until_it_is_forgotten() -> None:
    """The tokens of a block are an estimate, which changes while prompts that share blocks come and go."""
    trie = trie_with("r1", "r2")
    trie.insert("r1", keys_of(b"ab"), 0.0, weight=60)
    trie.insert("r1", keys_of(b"abcd"), 0.0, weight=70)
    trie.insert("r2", keys_of(b"abx"), 0.0, weight=70)
    assert (trie.weight_held_by("r1"), trie.weight_held_by("r2")) == (240, 180)
    assert trie.weight_of(keys_of(b"abcdef"), 70) == 60
    for name in ("r1", "r2"):
        trie.purge(name)
    assert not trie.sweep(0.0)
    assert trie.weight_of(keys_of(b"abcdef"), 70) == 70
    trie.check()


def test_a_prompt_whose_head_was_used_later_gets_its_weight() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"aaaa"), 0.0)
    trie.insert("r1", keys_of(b"aa"), 1.0)
    trie.weigh("r1", keys_of(b"aaaa"), 3)
    assert trie.weight_held_by("r1") == 12


def test_what_was_used_since_is_counted_by_weight() -> None:
    trie = trie_with("r1", ttl=100.0)
    for now, prompt in enumerate((b"aabb", b"aa", b"xyz")):
        trie.insert("r1", keys_of(prompt), float(now))
    assert [trie.used_since("r1", since, confirmed=True) for since in (-1.0, 0.0, 1.0, 2.0)] == [7, 5, 3, 0]


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
    trie.sweep(48.0 + TTL)
    trie.purge("r1")
    assert min(trie.evicted[reason] for reason in ("ttl", "memory", "purge")) > 0
    assert trie.lifetime is None


def test_what_expired_and_came_back_by_a_longer_ttl_is_confirmed_as_far_as_its_head_is() -> None:
    trie = RadixTrie(TTL, PLENTY, insert_holds=0)
    trie.add_replica("r1")
    trie.add_replica("r2")
    trie.insert("r1", keys_of(b"aabb"), 0.0)
    trie.insert("r2", keys_of(b"aacc"), 0.0)
    trie.insert("r1", keys_of(b"aa"), 20.0, confirmed=False)
    assert trie.pending_of("r1") == 2, "the head had expired"
    trie.ttl_s = 1e9
    trie.insert("r1", keys_of(b"aabb"), 21.0, confirmed=False)
    trie.remove_replica("r2")
    trie.sweep(21.0)
    trie.check()
    assert repr(trie).startswith("<RadixTrie 1 nodes, 4 blocks")
    assert trie.pending_of("r1") == 4


def test_what_has_expired_makes_no_room_for_what_is_pending() -> None:
    trie = trie_with("r1", capacity=4)
    trie.insert("r1", keys_of(b"aa"), 0.0)
    trie.insert("r1", keys_of(b"bb"), 5.0)
    trie.back("r1", 4)
    trie.insert("r1", keys_of(b"cccc"), 11.0, confirmed=False)
    assert trie.match(keys_of(b"bb"), 11.0) == {}, "not counted on: it will have to go"
    trie.take_back("r1", keys_of(b"cccc"))
    assert trie.match(keys_of(b"bb"), 11.0) == {"r1": 2}


def test_blocks_to_be_evicted_are_counted_in_blocks_of_their_own_weight() -> None:
    """The first one to go weighs more than what is missing: of the next ones, which are lighter, none goes."""
    trie = RadixTrie(60, 1 << 20)
    trie.add_replica("r", 20)
    trie.insert("r", keys_of(b"a"), 1.0, weight=10)
    trie.insert("r", keys_of(b"bc"), 2.0, weight=3)
    trie.back("r", 8)
    trie.insert("r", keys_of(b"defg"), 3.0, weight=2, confirmed=False)
    trie.check()
    assert [trie.match(keys_of(text), 4.0) for text in (b"a", b"bcx", b"defg")] == [{}, {"r": 2}, {"r": 4}]


@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 10, 90, 128]), st.integers(1, 4), st.booleans()), max_size=12),
    st.integers(1, 800),
)
def test_blocks_of_any_weights_are_held_and_matched_no_more_than_they_are(
    inserts: list[tuple[int, int, bool]], capacity: int
) -> None:
    trie, texts = RadixTrie(60, 1 << 20), [bytes([first]) * 4 for first in b"abcdefghijkl"]
    trie.add_replica("r", capacity)
    for text, (weight, blocks, confirmed) in zip(texts, inserts, strict=False):
        trie.insert("r", keys_of(text[:blocks]), 1.0, weight=weight, confirmed=confirmed)
        trie.check()
        matched = sum(trie.match(keys_of(text), 1.0).get("r", 0) for text in texts)
        assert 0 <= matched <= trie.held_by("r")


def test_the_end_of_a_prompt_is_not_confused_with_what_took_its_place() -> None:
    trie = trie_with("r1")
    trie.insert("r1", keys_of(b"ab"), 0.0)
    trie.insert("r1", keys_of(b"abc"), 0.0, confirmed=False)
    tail = trie.tail
    trie.take_back("r1", keys_of(b"abc"))  # another request with the same prompt has failed
    trie.insert("r1", keys_of(b"abx"), 0.0, confirmed=False)
    trie.confirm("r1", keys_of(b"abc"), 0.0, tail)
    assert trie.match(keys_of(b"abc"), 0.0) == trie.match(keys_of(b"abx"), 0.0) == {"r1": 3}
    assert trie.pending_of("r1") == 1, "the x"
    trie.check()


def test_a_match_of_some_replicas_is_theirs_in_the_match_of_all() -> None:
    trie, chance = RadixTrie(100.0, 1 << 24), random.Random(3)
    names = [f"r{number}" for number in range(6)]
    for name in names:
        trie.add_replica(name, 40)
    for now in range(300):
        keys = text_keys(b"".join(chance.choice((b"a", b"b")) * 8 for _ in range(chance.randint(1, 9))), 8, 0)
        if chance.random() < 0.05:
            trie.purge(chance.choice(names))
        trie.insert(chance.choice(names), keys, float(now))
        some, found = chance.sample(names, 3), trie.match(keys, float(now))
        assert trie.matched(some, keys, float(now)) == {name: found[name] for name in some if name in found}
