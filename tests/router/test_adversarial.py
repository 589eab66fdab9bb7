"""Traffic made to hurt: prompts, clocks, fleets, closes and engines at their worst. The invariants hold, memory stays in its
bound, no exception escapes.

The floods are scaled down to seconds: tens of thousands of one-block prompts stand for a million, with a memory bound that is
as much smaller, so that it has to forget most of them all the same.
"""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from router import Outcome, Prompt, Replica, Router
from router.types import KEY_BYTES

NAMES = ["r1", "r2", "r3"]
BLOCK = 256  # units
OK = Outcome(ok=True)
HONEST = 1.6  # the estimate of the trie's memory is within this factor of what is really taken, either way


def router_with(*names: str, memory: int = 1 << 24, capacity: int | None = None, **options: Any) -> Router:
    chosen = {"policy": "cost", "ttl_s": 300.0, "chance": random.Random(1), **options}
    router = Router(memory_bytes=memory, **chosen)
    for name in names:
        router.add(Replica(name, capacity))
    return router


def prompt(keys: bytes) -> Prompt:
    return Prompt(keys, len(keys) // KEY_BYTES * BLOCK + 100, BLOCK, "m")


# -- prompts: endless streams of keys, each a shape that some router's tracker has broken under


def distinct(chance: random.Random) -> Iterator[bytes]:
    """One block each, never twice the same."""
    for number in itertools.count():
        yield number.to_bytes(KEY_BYTES, "big")


def late(chance: random.Random) -> Iterator[bytes]:
    """A head of 200 blocks, the same for all, and a last block of one's own."""
    head = chance.randbytes(200 * KEY_BYTES)
    while True:
        yield head + chance.randbytes(KEY_BYTES)


def huge(chance: random.Random) -> Iterator[bytes]:
    """A million tokens, 15,625 blocks; every time other ones."""
    while True:
        yield chance.randbytes(15_625 * KEY_BYTES)


def splits(chance: random.Random) -> Iterator[bytes]:
    """Heads and branches of one long prompt, in an order that splits and merges its edges for ever."""
    trunk = chance.randbytes(300 * KEY_BYTES)
    while True:
        cut = chance.randrange(1, 300) * KEY_BYTES
        yield trunk[:cut]
        yield trunk[:cut] + chance.randbytes(KEY_BYTES * chance.randrange(1, 4))
        yield trunk


SHAPES: Mapping[str, tuple[Callable[[random.Random], Iterator[bytes]], int, int]] = MappingProxyType(
    {  # the shape, how many prompts, a bound that they exceed
        "distinct": (distinct, 30_000, 4_000_000),
        "late": (late, 6000, 600_000),
        "huge": (huge, 40, 1_000_000),
        "splits": (splits, 6000, 200_000),
    }
)


def flood(router: Router, keys: Iterator[bytes], count: int, chance: random.Random) -> None:
    """One in five fails, so that what was grown is taken back, too."""
    for turn, one in enumerate(itertools.islice(keys, count)):
        now = turn / 1000
        booking = router.choose(prompt(one), NAMES, now)
        booking.first_token(now)
        booking.close(Outcome(chance.random() < 0.8, booking.prompt.units // 4), now)
        assert router.trie.size_bytes <= router.trie.max_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_the_memory_bound_bites_and_holds(shape: str) -> None:
    kind, count, bound = SHAPES[shape]
    router, chance = router_with(*NAMES, memory=bound), random.Random(7)
    flood(router, kind(chance), count, chance)
    router.check()
    assert router.trie.evicted["memory"] > 0, "the flood was more than it could hold"
    assert router.trie.size_bytes > bound / 3 or shape == "huge", "and it held about what it might"
    assert router.ledger.open_leases == 0
    follow_up(router)


def follow_up(router: Router) -> None:
    """After whatever came: an ordinary conversation finds its way back."""
    keys, now = random.Random(99).randbytes(40 * KEY_BYTES), router.trie.now + 1
    first = router.choose(prompt(keys), NAMES, now)
    first.close(OK, now)
    assert router.choose(prompt(keys), NAMES, now + 10).chosen.replica == first.chosen.replica


@pytest.mark.parametrize("shape", SHAPES)
def test_the_estimate_of_memory_is_honest(shape: str) -> None:
    kind, count, bound = SHAPES[shape]
    chance = random.Random(7)
    gc.collect()
    tracemalloc.start()
    router = router_with(*NAMES, memory=bound // 2)
    flood(router, kind(chance), min(count, bound // 250), chance)
    gc.collect()
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert router.trie.evicted["memory"] > 0
    assert measured < HONEST * router.trie.max_bytes
    assert measured / HONEST < router.trie.size_bytes < measured * HONEST


def test_the_longest_prompt_is_matched_in_one_piece() -> None:
    router, keys = router_with(*NAMES), next(huge(random.Random(1)))
    first = router.choose(prompt(keys), NAMES, 0.0)
    first.close(Outcome(True, 1_000_000, 0), 100.0)
    again = router.choose(prompt(keys + bytes(KEY_BYTES)), NAMES, 101.0)
    assert (again.decision.reason, again.chosen.matched_blocks) == ("warm", 15_625)
    assert repr(router.trie).startswith("<RadixTrie 1 nodes")
    router.check()


# -- time


def test_a_clock_that_runs_backwards_stands_still() -> None:
    router, chance = router_with(*NAMES, capacity=50), random.Random(3)
    bookings = []
    for turn in range(600):
        now = 1e6 - 100.0 * turn
        booking = router.choose(prompt(bytes([turn % 7]) * KEY_BYTES * 9), NAMES, now, silent=turn % 5 == 0)
        bookings.append((booking, now))
        one, before = bookings.pop(chance.randrange(len(bookings)))
        one.first_token(before - 50.0)
        one.close(Outcome(True, 600, chance.choice([0, 300, 600])), before - 60.0)
        router.check()
    assert router.trie.now == 1e6
    assert all(100 < router.ledger.of(name).rate.value < 1e6 for name in NAMES), "time that ran back taught no speed"
    assert router.choose(prompt(b"x" * KEY_BYTES), NAMES, -1e9).chosen.cost.total_s >= 0


@pytest.mark.parametrize("now", [0.0, -1e18, 1e18])
def test_any_time_of_day_will_do(now: float) -> None:
    router = router_with(*NAMES)
    for step in (0.0, 1.0, -1.0):
        booking = router.choose(prompt(bytes(KEY_BYTES) * 4), NAMES, now + step)
        booking.first_token(now + step)
        booking.close(OK, now + step)
    router.check()


# -- fleets


def test_replicas_that_join_and_leave_at_every_step() -> None:
    router, chance = router_with("r1"), random.Random(5)
    fleet, under_way = ["r1"], []
    for turn in range(3000):
        now = turn / 10
        name = f"r{chance.randrange(40)}"
        if name in fleet and len(fleet) > 1:
            fleet.remove(name)
            router.remove(name)
        elif name not in fleet:
            fleet.append(name)
            router.add(Replica(name, chance.choice([None, 640, 64_000])))
        under_way.append(router.choose(prompt(bytes([turn % 11]) * KEY_BYTES * 20), fleet, now))
        booking = under_way.pop(chance.randrange(len(under_way))) if len(under_way) > 20 else under_way[0]
        chance.choice([booking.first_token, lambda now: None])(now)
        if chance.random() < 0.3:
            booking.move(fleet, now)
        booking.close(Outcome(chance.random() < 0.7, 1300, chance.choice([None, 0, 1200])), now)
        if turn % 50 == 0:
            router.check()
    for booking in under_way:
        booking.close(OK, 300.0)
    router.check()
    for name in list(router.replicas):
        router.remove(name)
    while router.sweep(300.0):
        router.check()
    assert repr(router) == "<Router cost, <Ledger >, <RadixTrie 0 nodes, 0 blocks on 0 replicas, 0 bytes>>", "nothing is left"


def test_a_move_to_a_replica_that_has_just_left_comes_home() -> None:
    router = router_with("r1", "r2")
    booking = router.choose(prompt(bytes(KEY_BYTES) * 4), ["r1"], 0.0)
    router.remove("r1")
    router.remove("r2")
    booking.move(["r2"], 1.0)
    booking.first_token(2.0)
    assert not booking.close(OK, 3.0)
    assert repr(router.ledger) == "<Ledger >"
    router.check()


# -- closes


def test_closes_that_come_twice_or_never() -> None:
    router, never = router_with(*NAMES), 0
    for turn in range(3000):
        booking = router.choose(prompt(bytes([turn % 13]) * KEY_BYTES * 3), NAMES, turn / 10)
        if turn % 10 == 0:
            never += 1
            continue
        for outcome in (OK, Outcome(ok=False), OK)[: 1 + turn % 3]:
            booking.close(outcome, turn / 10)
            booking.first_token(turn / 10)
            booking.move(NAMES, turn / 10)
        if turn % 100 == 0:
            router.check()
    assert router.ledger.open_leases == never
    assert sum(router.ledger.of(name).inflight for name in NAMES) == never
    router.check()


# -- engines


TOKENS, CACHED = (None, -5, 0, 1, 600, 10**15), (None, -(10**9), -1, 601, 10**15)
NONSENSE = [Outcome(True, tokens, cached) for tokens in TOKENS for cached in CACHED]


@pytest.mark.parametrize("outcome", NONSENSE, ids=str)
def test_a_count_that_cannot_be_is_not_believed(outcome: Outcome) -> None:
    """A count of cached tokens below zero or above the prompt. What is known stays: the speed, the scale, what is held."""
    router = router_with("r1")
    for turn in range(30):
        booking = router.choose(prompt(bytes([turn % 6]) * KEY_BYTES * 9), ["r1"], 10.0 * turn)
        booking.first_token(10.0 * turn + booking.chosen.uncached_tokens / 8000 + 1e-9)
        assert not booking.close(outcome, 10.0 * turn + 5)
        router.check()
    assert router.ledger.of("r1").rate.value == pytest.approx(8000, rel=0.5)
    assert 0.01 <= router.units_per_token("m") <= 1000
    assert router.trie.held_by("r1") == (0 if outcome.prompt_tokens == 1 else 6 * 9), "one token pays for no block"
