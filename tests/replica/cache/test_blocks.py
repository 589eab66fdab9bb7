"""The block ledger against an oracle that looks at everything it knows whenever it has to choose."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replica.cache.blocks import BlockLease, BlockLedger, CacheCounts
from replica.cache.prefix import BlockRun, Key, Prefix, Scope
from tests.support.machines import share_of

CAPACITY, SIZE = 12, 2
SALTED = Scope(salt="a")


def tokens_of(branch: int, blocks: int) -> list[int]:
    """Branches share their first three blocks."""
    return [at if at < 3 * SIZE else 100 * branch + at for at in range(blocks * SIZE)]


class Follower:
    """A listener that knows the cache from its events alone."""

    def __init__(self) -> None:
        self.held: set[Key] = set()
        self.tokens: dict[Key, list[int]] = {}

    def stored(self, run: BlockRun) -> None:
        size, parent = len(run.tokens) // len(run.keys), run.parent
        for at, key in enumerate(run.keys):
            assert key not in self.held
            assert parent is None or parent in self.held
            self.held.add(key)
            own = run.tokens[at * size : (at + 1) * size].tolist()
            self.tokens[key] = [*(self.tokens[parent] if parent else []), *own]
            # A key is what its tokens and its scope make it, whoever computes it.
            assert Prefix(self.tokens[key], size, run.scope).keys[-1] == key
            parent = key

    def removed(self, key: Key) -> None:
        self.held.remove(key)

    def cleared(self) -> None:
        self.held.clear()


@dataclass
class Known:
    """What the oracle knows of a cached block."""

    holders: list[BlockLease] = field(default_factory=list)
    last_use: int = 0
    keep_until: float = 0.0


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self, follower: Follower | None = None) -> None:
        super().__init__()
        self.follower = follower or Follower()
        self.ledger = BlockLedger(CAPACITY, SIZE, (self.follower,))
        self.memory: dict[int, Key] = {}  # what an engine would have computed into each block
        self.known: dict[Key, Known] = {}
        self.leases: list[BlockLease] = []
        self.promised: dict[int, int] = {}  # by a lease's identity
        self.counted: set[int] = set()  # likewise
        self.hits = self.misses = 0
        self.now, self.uses, self.evicted = 0.0, 0, 0

    def own(self) -> int:
        return sum(len(lease.blocks) - lease.shared for lease in self.leases)

    def room(self, spared: list[Key]) -> int:
        """What is promised to nobody, if these were held."""
        held = sum(bool(known.holders) or key in spared for key, known in self.known.items())
        return CAPACITY - held - self.own() - sum(self.promised.values())

    def evict_for(self, blocks: int) -> None:
        while CAPACITY - len(self.known) - self.own() < blocks:
            idle = {key: known for key, known in self.known.items() if not known.holders}
            fair = {key: known for key, known in idle.items() if known.keep_until <= self.now}
            if fair:
                victim = min(fair, key=lambda key: fair[key].last_use)
            else:
                victim = min(idle, key=lambda key: (idle[key].keep_until, idle[key].last_use))
            del self.known[victim]
            self.evicted += 1

    @rule(
        branch=st.integers(0, 3),
        blocks=st.integers(0, 8),
        extra=st.integers(0, 4),
        promised=st.sampled_from([0, 0, 1, 4]),
        keep=st.sampled_from([0.0, 0.0, 5.0, 60.0]),
        scope=st.sampled_from([Scope(), SALTED]),
    )
    def reserve(self, branch: int, blocks: int, extra: int, promised: int, keep: float, scope: Scope) -> None:
        prefix = Prefix([*tokens_of(branch, blocks), 7], SIZE, scope)
        hits = prefix.keys[: next((at for at, key in enumerate(prefix.keys) if key not in self.known), blocks)]
        need = blocks + extra - len(hits)
        fits = need + promised <= self.room(hits)
        before = repr(self.ledger)
        lease = self.ledger.reserve(prefix, blocks + extra, self.now, keep, most=blocks + extra + promised)
        assert (lease is not None) == fits
        if lease is None:
            assert repr(self.ledger) == before
            return
        assert lease.shared == len(hits)
        for at, key in enumerate(hits):
            assert self.memory[lease.blocks[at]] == key, "a hit on a block that holds something else"
            self.known[key].holders.append(lease)
        self.evict_for(need)
        self.leases.append(lease)
        self.promised[id(lease)] = promised
        self.count(lease, need)

    def count(self, lease: BlockLease, taken: int) -> None:
        """With its first private block it is certain what a prompt found."""
        if taken and id(lease) not in self.counted:
            self.counted.add(id(lease))
            self.hits += lease.shared
            self.misses += lease.prefix.matchable - lease.shared

    @rule(branch=st.integers(0, 3), blocks=st.integers(1, 8), more=st.integers(0, 4))
    def promise(self, branch: int, blocks: int, more: int) -> None:
        """All but the cached head is promised, and nothing is taken."""
        prefix = Prefix([*tokens_of(branch, blocks), 7], SIZE)
        hits = prefix.keys[: next((at for at, key in enumerate(prefix.keys) if key not in self.known), blocks)]
        promised = blocks + more - len(hits)
        fits = promised <= self.room(hits)
        lease = self.ledger.reserve(prefix, 0, self.now, most=blocks + more)
        assert (lease is not None) == fits
        if lease is not None:
            for key in hits:
                self.known[key].holders.append(lease)
            self.leases.append(lease)
            self.promised[id(lease)] = promised

    @precondition(lambda self: any(self.unstarted()))
    @rule(data=st.data())
    def rematch(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.unstarted())))
        keys = lease.prefix.keys[: lease.prefix.matchable]
        count = next((at for at, key in enumerate(keys) if key not in self.known), len(keys))
        if count - lease.shared > self.promised[id(lease)]:
            with pytest.raises(ValueError, match="was promised"):
                self.ledger.rematch(lease)
            return
        for key in keys[lease.shared : count]:
            self.known[key].holders.append(lease)
        self.promised[id(lease)] -= count - lease.shared
        self.ledger.rematch(lease)
        assert lease.shared == len(lease.blocks) == count
        assert all(self.memory[block] == key for block, key in zip(lease.blocks, keys, strict=False))

    def unstarted(self) -> Iterator[BlockLease]:
        """Those that have nothing but shared blocks."""
        return (lease for lease in self.leases if lease.shared == len(lease.blocks))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.integers(0, 6))
    def grow(self, data: st.DataObject, more: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        kept = min(more, self.promised[id(lease)])
        fits = more - kept <= self.room([])
        if fits:
            self.evict_for(more)
            self.promised[id(lease)] -= kept
            self.count(lease, more)
        assert self.ledger.grow(lease, len(lease.blocks) + more, self.now) == fits

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.name(lease, data.draw(st.integers(0, min(len(lease.prefix.keys), len(lease.blocks)))))

    def name(self, lease: BlockLease, count: int) -> None:
        for at in range(lease.shared, count):
            self.memory[lease.blocks[at]] = lease.prefix.keys[at]
            self.known.setdefault(lease.prefix.keys[at], Known()).holders.append(lease)
        self.ledger.commit(lease, count)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(branch=st.integers(0, 3), blocks=st.integers(1, 8), keep=st.sampled_from([0.0, 0.0, 5.0, 60.0]))
    def whole_request(self, branch: int, blocks: int, keep: float) -> None:
        before = len(self.leases)
        self.reserve(branch, blocks, 0, 0, keep, Scope())
        if len(self.leases) > before:
            self.name(self.leases[-1], blocks)
            self.end(self.leases.pop())

    def end(self, lease: BlockLease) -> None:
        keys = lease.prefix.keys[: lease.shared]
        del self.promised[id(lease)]
        self.counted.discard(id(lease))
        self.ledger.release(lease, self.now)
        assert (lease.blocks, lease.shared) == ([], 0)
        for key in reversed(keys):
            known = self.known[key]
            known.holders.remove(lease)
            self.uses += 1
            known.last_use = self.uses
            if lease.keep_s:
                known.keep_until = max(known.keep_until, self.now + lease.keep_s)

    @rule(seconds=st.sampled_from([1.0, 4.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def clear(self) -> None:
        unused = not any(known.holders for known in self.known.values())
        assert self.ledger.clear() == (unused and self.own() == sum(self.promised.values()) == 0)
        if not self.ledger.counts().idle:
            self.known = {key: known for key, known in self.known.items() if known.holders}

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        counts = self.ledger.counts()
        held = sum(bool(known.holders) for known in self.known.values())
        assert (counts.held, counts.idle, counts.evicted) == (held, len(self.known) - held, self.evicted)
        assert (counts.hits, counts.misses) == (self.hits, self.misses)
        assert counts.free == CAPACITY - len(self.known) - self.own()
        assert self.ledger.used == held + self.own()
        assert self.ledger.spare == self.room([])
        assert self.follower.held == set(self.known)
        for branch in range(4):
            keys = Prefix(tokens_of(branch, 8), SIZE).keys
            assert self.ledger.match(keys) == next((at for at, key in enumerate(keys) if key not in self.known), 8)

    def teardown(self) -> None:
        for lease in self.leases:
            self.ledger.release(lease, self.now)
        assert self.ledger.used == 0
        self.after_a_restart()

    def after_a_restart(self) -> None:
        """What is idle goes into a new ledger, which then forgets in the same order."""
        blocks = self.ledger.idle()
        scopes = {key: scope for scope in (Scope(), SALTED) for branch in range(4) for key in self.keys(branch, scope)}
        runs = [
            BlockRun((idle.key,), idle.parent, array("I", self.follower.tokens[idle.key][-SIZE:]), scopes[idle.key])
            for idle in blocks
        ]
        follower = Follower()
        again = BlockLedger(CAPACITY, SIZE, (follower,))
        numbers = again.adopt([(run, idle.keep_until) for run, idle in zip(runs, blocks, strict=True)], self.now)
        again.check()
        assert [idle.block for idle in again.idle()] == numbers
        assert [idle.key for idle in again.idle()] == [idle.key for idle in blocks]
        assert follower.held == {idle.key for idle in blocks}
        for ledger in (self.ledger, again):
            lease = ledger.reserve(Prefix([9], SIZE), CAPACITY // 2, self.now)
            assert lease is not None
        assert {idle.key for idle in again.idle()} == {idle.key for idle in self.ledger.idle()}

    @staticmethod
    def keys(branch: int, scope: Scope) -> list[Key]:
        return Prefix(tokens_of(branch, 8), SIZE, scope).keys


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=share_of(200), stateful_step_count=30, deadline=None)


def used(ledger: BlockLedger, tokens: list[int], keep_s: float = 0.0, now: float = 0.0) -> int:
    """One request from its start to its end; the blocks that it hit."""
    prefix = Prefix(tokens, ledger.size)
    lease = ledger.reserve(prefix, -(-len(tokens) // ledger.size), now, keep_s)
    assert lease is not None
    hits = lease.shared
    ledger.commit(lease, len(prefix.keys))
    ledger.release(lease, now)
    ledger.check()
    return hits


def test_the_tail_is_evicted_before_the_head_and_one_block_at_a_time() -> None:
    ledger = BlockLedger(4, 1)
    used(ledger, [1, 2, 3, 4])
    used(ledger, [9])
    assert ledger.match(Prefix([1, 2, 3, 4], 1).keys) == 3
    assert ledger.counts() == CacheCounts(misses=3, evicted=1, idle=4)


def test_what_is_to_be_kept_outlives_what_is_used_later_until_its_time_is_up() -> None:
    for later, left in ((100.0, 2), (301.0, 0)):
        ledger = BlockLedger(4, 1)
        used(ledger, [1, 2], keep_s=300.0)
        used(ledger, [8, 9], now=1.0)
        used(ledger, [5, 6], now=later)
        assert ledger.match(Prefix([1, 2], 1).keys) == left
        assert ledger.counts().evicted_kept == 0


def test_pressure_overrides_what_is_to_be_kept_the_first_to_end_goes_first() -> None:
    ledger = BlockLedger(4, 1)
    used(ledger, [1, 2], keep_s=3600.0)
    used(ledger, [8, 9], keep_s=300.0)
    used(ledger, [5, 6])
    assert ledger.match(Prefix([1, 2], 1).keys) == 2
    used(ledger, [5, 6, 7, 4])
    assert ledger.counts().evicted_kept == 4


@pytest.mark.parametrize("later", [0.0, 5.0])
def test_a_hit_with_no_wish_or_a_lesser_one_does_not_shorten_the_time(later: float) -> None:
    ledger = BlockLedger(4, 1)
    used(ledger, [1, 2], keep_s=300.0)
    used(ledger, [1, 2], keep_s=later, now=10.0)
    used(ledger, [7, 8], now=20.0)
    used(ledger, [5, 6], now=30.0)
    assert ledger.match(Prefix([1, 2], 1).keys) == 2


def test_hits_without_end_leave_nothing_behind() -> None:
    ledger = BlockLedger(4, 1)
    hits = [used(ledger, [1, 2, 3], keep_s=at % 2) for at in range(1000)]  # each ends with check(), which bounds what is kept
    assert hits == [0, *[2] * 999]


def test_two_that_compute_the_same_share_one_copy_afterwards() -> None:
    ledger = BlockLedger(4, 1)
    one, two = (ledger.reserve(Prefix([1, 2], 1), 2, 0.0) for _ in range(2))
    assert one is not None
    assert two is not None
    ledger.commit(one, 2)
    ledger.commit(two, 2)
    assert one.blocks == two.blocks
    assert ledger.used == 2
    ledger.check()


def test_what_a_prompt_finds_is_counted_once_when_it_is_certain() -> None:
    """A counter that goes down is a restart to Prometheus."""
    ledger = BlockLedger(8, 1)
    one, two = (ledger.reserve(Prefix([1, 2, 3], 1), 0, 0.0, most=4) for _ in range(2))
    assert one is not None
    assert two is not None
    seen = [ledger.counts()]
    for lease in (one, two):
        ledger.rematch(lease)
        seen.append(ledger.counts())
        for blocks in (3, 4):
            assert ledger.grow(lease, blocks, 0.0)
            seen.append(ledger.counts())
        ledger.commit(lease, 3)
    assert [(counts.hits, counts.misses) for counts in seen] == [(0, 0), (0, 0), (0, 2), (0, 2), (0, 2), (2, 2), (2, 2)]


def test_a_prompts_last_token_is_never_a_hit() -> None:
    ledger = BlockLedger(8, 2)
    assert [used(ledger, tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5])] == [0, 1, 2]


def test_only_an_unused_ledger_is_cleared() -> None:
    ledger = BlockLedger(4, 1)
    lease = ledger.reserve(Prefix([1], 1), 1, 0.0)
    assert lease is not None
    assert not ledger.clear()
    ledger.release(lease, 0.0)
    assert ledger.clear()
    assert repr(ledger) == "<BlockLedger 4 blocks: 0 held, 0 private, 0 idle, 4 free>"


def test_more_than_there_is_cannot_be_named_or_adopted() -> None:
    ledger = BlockLedger(2, 1)
    lease = ledger.reserve(Prefix([1, 2, 3], 1), 1, 0.0)
    assert lease is not None
    with pytest.raises(ValueError, match="cannot cache 2 blocks of 1, 3 of them full"):
        ledger.commit(lease, 2)
    with pytest.raises(ValueError, match="cannot add 3 blocks"):
        ledger.adopt([(BlockRun((bytes([at]),), None, array("I", [at]), Scope()), 0.0) for at in range(3)], 0.0)


@pytest.mark.parametrize(("capacity", "size"), [(0, 16), (4, 0)])
def test_a_cache_has_at_least_one_block_of_one_token(capacity: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockLedger(capacity, size)
