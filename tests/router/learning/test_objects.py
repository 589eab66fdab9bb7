"""Who has an object: beside a dictionary, and in a flood."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from router import Replica, Router
from router.events import decode, encode
from router.follower import Follower
from router.learning.objects import MAX_OBJECTS, TTL_S, Objects
from router.replication_log import Journal
from tests.support.strategies import replicas

steps = st.lists(st.tuples(st.integers(0, 3), st.none() | replicas, st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S])), max_size=30)


@given(steps)
def test_what_was_put_is_found_until_its_time_is_over(some: list[tuple[int, str | None, float]]) -> None:
    objects, oracle, now = Objects(), dict[int, tuple[str, float]](), 0.0
    for number, replica, pause in some:
        now += pause
        if replica:
            objects.put(number, replica, "m", now)
            oracle[number] = replica, now
        known = oracle.get(number)
        assert objects.find(number, now) == ((known[0], "m") if known and now - known[1] <= TTL_S else None)
        objects.check()


def test_a_flood_leaves_the_last_ones_and_those_that_are_asked_for() -> None:
    objects = Objects()
    for number in range(MAX_OBJECTS):
        objects.put(number, "r1", "m", 0.0)
    assert objects.find(0, 1.0)
    for number in range(MAX_OBJECTS, MAX_OBJECTS + 100):
        objects.put(number, "r1", "m", 1.0)
    assert len(objects) == MAX_OBJECTS
    assert objects.find(0, 2.0)
    assert objects.find(1, 2.0) is None


def test_routers_that_follow_each_other_know_the_same() -> None:
    journal = Journal(lambda: None)
    router, other = (
        Router(policy="cost", ttl_s=10, memory_bytes=1 << 20, chance=random.Random(1), journal=one) for one in (journal, None)
    )
    router.add(Replica("r1"))
    router.stored(2**64 - 1, "r1", "m", 5.0)
    Follower(other).apply(1, decode(encode(journal.take())))
    assert other.objects.find(2**64 - 1, 6.0) == ("r1", "m") == router.objects.find(2**64 - 1, 6.0)
