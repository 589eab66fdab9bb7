"""What one client sends, or one replica says, does not make a replica seem busier than it can be: conversations of others stay.

Every request counts by the estimate of its tokens, and a client can make that too high (text of long tokens). The engines of
these floods compute little, so nobody has a reason to leave.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest

from router import Booking, Outcome, Prompt, Replica, Router
from router.learning.conversations import PRIOR
from router.learning.foreign import BUSY_S
from router.pricing.cost import FREE_SHARE
from router.types import KEY_BYTES, MOST_SEQUENCES

RATE = 10_000.0  # tokens per second
BLOCK = 64  # tokens
POOLS = {"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}
CONVERSATIONS = 12  # of each pool
BEGINS_S, ENDS_S, LONG_S = 60, 120, 180  # of the flood in pool a, and of all
TOGETHER = 60  # requests of the flood that come at once
FLOODER = 666
TINY = 100  # tokens that an engine computes of a request of the flood


class Even:
    """Chance without chance: what one pool draws changes nothing for the other."""

    def random(self) -> float:
        return 0.5


class Fleet:
    """A router with engines that compute one prompt after the other. waited: replica -> the time in which somebody waited for a
    first token. homes: conversation -> the replicas of its turns.
    """

    def __init__(self) -> None:
        self.router = Router(policy="cost", ttl_s=3600.0, memory_bytes=1 << 26, chance=Even())
        for pool, names in POOLS.items():
            for name in names:
                self.router.add(Replica(name, pool=pool))
                self.router.ledger.restore(name, (1e6, 1e6 / RATE), 0.0, 0.0)
        self.router.ledger.rates.refresh()
        self.waited = dict.fromkeys(itertools.chain(*POOLS.values()), 0.0)
        self.homes: dict[tuple[str, int], list[str]] = {}
        self._free = dict.fromkeys(self.waited, 0.0)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def run(self) -> None:
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def choose(self, prompt: Prompt, replicas: list[str], now: float, *, silent: bool = False) -> Booking:
        booking = self.router.choose(prompt, replicas, now, silent=silent)
        while booking.release(now):
            booking.move(replicas, now)
        return booking

    def serve(self, booking: Booking, computed: int, outcome: Outcome, now: float) -> None:
        """Its engine computes so many tokens of it, in its turn."""
        name = booking.lease.replica
        begun = max(now, self._free[name])
        self._free[name] = ends = begun + computed / RATE
        self.waited[name] += ends - begun
        self.at(ends, booking.first_token)
        self.at(ends + 0.01, partial(self._end, booking, outcome))

    def _end(self, booking: Booking, outcome: Outcome, now: float) -> None:
        booking.close(outcome, now)

    def converse(self) -> None:
        """Conversations of others, in both pools: turns of 640 tokens, every 12 seconds."""
        for pool in POOLS:
            for number in range(CONVERSATIONS):
                keys = random.Random(f"{pool}{number}").randbytes(200 * KEY_BYTES)
                for turn, second in enumerate(range(number, LONG_S, CONVERSATIONS)):
                    self.at(float(second), self._turn(pool, number, keys[: 10 * (turn + 1) * KEY_BYTES]))

    def _turn(self, pool: str, number: int, keys: bytes) -> Callable[[float], None]:
        def take(now: float) -> None:
            asked = prompt(keys, number + 1)
            booking = self.choose(asked, POOLS[pool], now)
            self.homes.setdefault((pool, number), []).append(booking.lease.replica)
            cached = booking.chosen.matched_tokens
            self.serve(booking, asked.units - cached, Outcome(True, asked.units, cached), now)

        return take

    def learned(self, pool: str) -> list[float]:
        work = self.router.ledger.rates.of(POOLS[pool][0]).pool.conversation
        return [work.value, work.request_s, work.returning, *(self.router.ledger.of(name).busy(LONG_S) for name in POOLS[pool])]


def prompt(keys: bytes, client: int) -> Prompt:
    return Prompt(keys, len(keys) // KEY_BYTES * BLOCK + 10, BLOCK, "", client=client)


# -- floods: what becomes of one request. Its own text are 70 blocks, of which the engine makes TINY tokens.

HEAD = random.Random("head").randbytes(1000 * KEY_BYTES)
HEAD_TOKENS = 1000 * BLOCK
AT = ["a1"]  # each refers to an object there
Request = Callable[[Fleet, bytes, float], None]


def turns(fleet: Fleet, own: bytes, now: float) -> None:
    """Next turns of one long conversation, at its replica."""
    counted = Outcome(True, HEAD_TOKENS + TINY, HEAD_TOKENS)
    fleet.serve(fleet.choose(prompt(HEAD + own, FLOODER), AT, now), TINY, counted, now)


def beginnings(fleet: Fleet, own: bytes, now: float) -> None:
    fleet.serve(fleet.choose(prompt(own, FLOODER), AT, now), TINY, Outcome(True, TINY, 0), now)


def plain(fleet: Fleet, own: bytes, now: float) -> None:
    fleet.serve(fleet.choose(prompt(own, FLOODER), AT, now, silent=True), TINY, Outcome(True, TINY, 0), now)


def tiny(fleet: Fleet, own: bytes, now: float) -> None:
    fleet.serve(fleet.choose(prompt(b"", FLOODER), AT, now), TINY, Outcome(True, TINY, 0), now)


def repeated(fleet: Fleet, own: bytes, now: float) -> None:
    fleet.serve(fleet.choose(prompt(HEAD, FLOODER), AT, now), TINY, Outcome(True, HEAD_TOKENS + 10, HEAD_TOKENS), now)


def left(fleet: Fleet, own: bytes, now: float) -> None:
    fleet.choose(prompt(own, FLOODER), AT, now).close(Outcome(False), now)


def absurd(fleet: Fleet, own: bytes, now: float) -> None:
    asked = prompt(HEAD + own, FLOODER)
    asked.sequences = MOST_SEQUENCES
    fleet.serve(fleet.choose(asked, AT, now), TINY, Outcome(True, 10**15, 10**15), now)


FLOODS: list[Request] = [turns, beginnings, plain, tiny, repeated, left, absurd]


def conversing(flood: Request | None = None) -> Fleet:
    fleet, own = Fleet(), random.Random("own")
    fleet.converse()

    def together(now: float) -> None:
        for _ in range(TOGETHER):
            if flood is not None:
                flood(fleet, own.randbytes(70 * KEY_BYTES), now)

    for second in range(BEGINS_S, ENDS_S, 3):
        fleet.at(second + 0.2, together)
    fleet.run()
    fleet.router.check()
    return fleet


@pytest.fixture(scope="module")
def calm() -> Fleet:
    return conversing()


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_conversations_of_others_stay(flood: Request, calm: Fleet) -> None:
    fleet = conversing(flood)
    for name, waited_s in fleet.waited.items():
        assert waited_s < FREE_SHARE * BUSY_S, "the engines have time"
        assert fleet.router.ledger.of(name).busy(LONG_S) <= waited_s / BUSY_S
    more_s = fleet.waited["a1"] - calm.waited["a1"]
    assert fleet.learned("a")[0] <= calm.learned("a")[0] + more_s / PRIOR
    assert fleet.homes == calm.homes
    assert fleet.learned("b") == calm.learned("b"), "another pool has learned nothing of it"
