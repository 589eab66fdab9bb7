"""The whole router, everything at once: replicas that come, go, grow, shrink and restart, engines that lie, events that come
late, twice or never, a clock that jumps, every policy, tight and wide memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from router import Booking, Outcome, Prompt, Replica, Router
from router.pricing.replication import MAX_PREFIXES
from router.simulation.policies import SIMULATED
from router.snapshot.collect import collect
from router.snapshot.records import decode, encode
from router.snapshot.restore import Restorer
from router.types import TOKEN_WEIGHT
from tests.support.machines import STEPS, CountedMachine, steps_of
from tests.support.strategies import keys_of, letters, replicas

NAMES = ["r1", "r2", "r3"]
nonsense = st.sampled_from([-(10**9), 10**12])
counts = st.none() | st.integers(0, 12) | nonsense


def prompt_of(text: bytes, more: int, scale: str, session: str, client: int, adapter: str) -> Prompt:
    prompt = Prompt(keys_of(text), len(text) + more, 1, scale, session, client, len(session))
    prompt.adapter = adapter
    return prompt


prompts = st.builds(
    prompt_of,
    letters,
    st.integers(0, 3) | st.just(20_000),  # units beyond the last full block, few or many
    st.sampled_from(["", "m", "n"]),
    st.sampled_from(["", "", "alice", "bob"]),
    st.integers(1, 3),
    st.sampled_from(["", "", "a", "b", "c"]),
)


def shown(router: Router) -> str:
    """Everything that the router knows, as far as it can be seen."""
    scales = [router.units_per_token(scale) for scale in "mn"]
    capacities = [router.learned_capacity(name) for name in NAMES]
    known = [session and (session.holders, router.sessions.share(session, 0)) for session in map(router.sessions.find, (3, 5))]
    return f"{router!r} {router.rents!r} {router.ledger.turn_gap!r} {router.trie.held()} {scales} {capacities} {known}"


class RouterMachine(CountedMachine):
    @initialize(
        policy=st.just("cost") | st.sampled_from(sorted(SIMULATED)),
        memory=st.sampled_from([3000, 30_000, 1 << 20]),
        capacity=st.none() | st.integers(1, 10),
    )
    def start(self, policy: str, memory: int, capacity: int | None) -> None:
        self.router = Router(policy=policy, policies=SIMULATED, ttl_s=10, memory_bytes=memory, chance=random.Random(1))
        self.bound, self.now = memory, 0.0
        self.bookings: list[Booking] = []  # those that something may still happen to
        self.open: set[Booking] = set()
        for name in NAMES[1:]:
            self.join(name, capacity)

    @rule()
    def copy(self) -> None:
        """A router that begins with a snapshot believes in nothing that this one does not."""
        copy = Router(policy="cost", ttl_s=10, memory_bytes=self.bound, chance=random.Random(1))
        for replica in self.router.replicas.values():
            copy.add(replica)
        now = max(self.now, self.router.trie.now)
        restorer = Restorer(copy, now, now)
        for records in collect(self.router, now):
            restorer.add(decode(encode(records)))
        for _ in restorer.steps(lambda _name: False):
            pass
        copy.check()
        for name, blocks in copy.trie.held().items():
            assert blocks <= self.router.trie.held_by(name)

    # -- replicas

    @rule(name=replicas, capacity=st.none() | st.integers(1, 10))
    def join(self, name: str, capacity: int | None) -> None:
        """Anew, again, or with another capacity."""
        self.router.add(Replica(name, capacity))

    @rule(name=replicas)
    def leave(self, name: str) -> None:
        self.router.remove(name)
        assert self.router.learned_capacity(name) is None
        assert self.router.trie.held_by(name) == 0

    @rule(name=replicas)
    def restart(self, name: str) -> None:
        self.router.restarted(name)
        assert self.router.trie.held_by(name) == 0

    @rule()
    def prove(self) -> None:
        """The replicas compute one prompt at a time: requests wait in line."""
        for load in self.router.ledger.loads.values():
            while not load.serial.proven:
                load.serial.learn(10_000, 1e9, 1.0)

    # -- requests

    @precondition(lambda self: self.router.replicas)
    @rule(prompt=prompts, times=st.integers(2, 5))
    def burst(self, prompt: Prompt, times: int) -> None:
        for _ in range(times):
            self.choose(prompt, silent=False)

    @precondition(lambda self: self.router.replicas)
    @rule(prompt=prompts, silent=st.booleans())
    def choose(self, prompt: Prompt, silent: bool) -> None:
        names = list(self.router.replicas)
        _, ranking = self.router.rank(prompt, names, self.now)
        booking = self.router.choose(prompt, names, self.now, silent=silent)
        assert booking.chosen.replica in names
        assert 0 <= booking.chosen.matched_tokens <= booking.decision.available_tokens <= booking.decision.prompt_tokens
        if self.router.policy_name == "cost":
            assert booking.chosen.cost.total_s == pytest.approx(ranking[0].cost.total_s, abs=1e-9)
        self.bookings.append(booking)
        self.open.add(booking)

    @precondition(lambda self: self.router.replicas)
    @rule(
        prompt=prompts,
        reports=st.lists(st.sampled_from([0, 0, 2, 5, 12]), min_size=1, max_size=5),
        pause=st.sampled_from([0.0, 0.3, 3.0]),
    )
    def ask_again_and_again(self, prompt: Prompt, reports: list[int], pause: float) -> None:
        """The same prompt from its choice to its end, as often as the engine reports cached tokens, true or not."""
        for cached in reports:
            self.choose(prompt, silent=False)
            booking = self.bookings.pop()
            booking.first_token(self.now + 0.1)
            self.now += pause
            booking.close(Outcome(True, 12, cached), self.now)
            self.open.discard(booking)

    @precondition(lambda self: self.bookings)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.one(data).first_token(self.now)

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), names=st.lists(replicas, min_size=1, unique=True))
    def move(self, data: st.DataObject, names: list[str]) -> None:
        """Also to replicas that have left."""
        booking = self.one(data)
        before = booking.chosen
        booking.move(names, self.now)
        assert booking.chosen is before if booking.lease.closed else booking.chosen.replica in names

    @precondition(lambda self: self.open)
    @rule(data=st.data(), names=st.lists(replicas, min_size=1, unique=True))
    def release(self, data: st.DataObject, names: list[str]) -> None:
        """The wait is over, whatever has become of the lead or the line."""
        booking = data.draw(st.sampled_from([booking for booking in self.bookings if booking in self.open]))
        if booking.release(self.now):
            booking.move(names, self.now)
        elif booking.lease.replica in self.router.replicas:
            assert booking.pending

    @precondition(lambda self: self.bookings)
    @rule(data=st.data(), outcome=st.builds(Outcome, st.booleans(), counts, counts), keep=st.booleans())
    def close(self, data: st.DataObject, outcome: Outcome, keep: bool) -> None:
        booking = self.one(data)
        was_open, was_known = not booking.lease.closed, booking.chosen.replica in self.router.replicas
        lost = booking.close(outcome, self.now)
        assert not lost or (was_open and was_known and outcome.ok and outcome.cached_tokens == 0)
        self.open.discard(booking)
        if not keep:
            self.bookings.remove(booking)

    # -- the rest

    @precondition(lambda self: self.router.replicas)
    @rule(prompt=prompts, names=st.lists(replicas, min_size=1, unique=True))
    def rank(self, prompt: Prompt, names: list[str]) -> None:
        """A dry run. What time alone changes is let happen before."""
        for name in names:
            self.router.ledger.of(name).advance(self.now)
        before = shown(self.router)
        decision, ranking = self.router.rank(prompt, names, self.now)
        assert shown(self.router) == before
        assert decision.best is ranking[0]
        assert sorted(candidate.replica for candidate in ranking) == sorted(names)

    @rule(seconds=st.sampled_from([-1000.0, -5.0, 0.0, 0.1, 4.0, 6.0, 11.0, 1000.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        while self.router.sweep(self.now):
            self.router.check()
        trie = self.router.trie
        for name, replica in self.router.replicas.items():
            for capacity in (replica.capacity_tokens, self.router.learned_capacity(name)):
                assert capacity is None or trie.weight_held_by(name) - trie.pending_of(name) <= capacity * TOKEN_WEIGHT

    def one(self, data: st.DataObject) -> Booking:
        return data.draw(st.sampled_from(self.bookings))

    @invariant()
    def sound(self) -> None:
        self.router.check()
        assert self.router.trie.size_bytes <= self.bound
        assert len(self.router.rents) <= MAX_PREFIXES
        if not self.open:
            assert self.router.trie.pending_bytes == 0
        assert self.router.ledger.open_leases == len(self.open)
        assert self.router.adapters.open_requests <= sum(bool(booking.prompt.adapter) for booking in self.open)
        expected = {booking.lease.replica for booking in self.open} | self.router.replicas.keys()
        assert self.router.ledger.loads.keys() <= expected, "the load of a replica that left long ago"
        assert all(0.01 <= self.router.units_per_token(scale) <= 1000 for scale in "mn")


def test_nothing_that_may_happen_breaks_the_router() -> None:
    assert steps_of(RouterMachine, examples=280, steps=50) >= STEPS
