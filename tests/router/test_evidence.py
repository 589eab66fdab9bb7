from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.evidence import GROWTH, MEASURE_S, RESTART_MISSES, Evidence

ROW = [False] * (RESTART_MISSES - 1) + [True]


def unknown(**known: Any) -> Evidence:
    """Of a replica that does not say how large its cache is, but does say what was cached."""
    return Evidence(learns_capacity=True, **{"hits": True, "held": 100, **known})


def gone(evidence: Evidence, younger: int = 50, cached_nothing: bool = True, sent: float = 1.0) -> bool:
    """A miss that cannot be for want of room, unless it says so."""
    return evidence.lost(younger, cached_nothing, sent)


# -- restarts


def test_only_a_row_of_misses_makes_a_restart() -> None:
    evidence = unknown()
    assert [gone(evidence) for _ in ROW] == ROW
    assert evidence.capacity is None, "nothing was said of its size"


@pytest.mark.parametrize("between", ["hit", "part"])
def test_a_token_that_was_there_ends_the_row(between: str) -> None:
    evidence = unknown()
    for _ in range(5):
        assert not any(gone(evidence) for _ in range(RESTART_MISSES - 1))
        if between == "hit":
            evidence.hit()
        else:
            assert not gone(evidence, cached_nothing=False)


def test_a_hit_of_a_part_shows_that_hits_are_told() -> None:
    evidence = unknown(hits=False)
    assert not any(gone(evidence) for _ in range(10))
    gone(evidence, cached_nothing=False)
    assert [gone(evidence) for _ in ROW] == ROW


def test_what_may_be_for_want_of_room_is_no_sign_of_a_restart() -> None:
    evidence = unknown()
    assert not any(gone(evidence, younger=101) for _ in range(10))
    assert [gone(evidence, younger=100) for _ in ROW] == ROW


def test_what_was_sent_before_the_purge_says_nothing_of_the_new_cache() -> None:
    evidence = unknown()
    gone(evidence)
    evidence.purged(5.0)
    evidence.hit()
    assert not any(gone(evidence, younger, sent=sent) for sent in (1.0, 4.9, 5.0) * 5 for younger in (50, 200))
    assert evidence.capacity is None
    assert [gone(evidence, sent=5.1) for _ in ROW] == ROW


def test_who_never_reports_a_hit_never_restarts() -> None:
    """It does not count, or does not cache: there is nothing to lose."""
    evidence = unknown(hits=False)
    assert not any(gone(evidence) for _ in range(50))
    evidence.hit()
    assert [gone(evidence, sent=3.0) for _ in ROW] == ROW
    evidence.purged(4.0)
    assert not any(gone(evidence, sent=5.0) for _ in range(50)), "nor does it twice, without a hit between"


# -- how large a cache is


def test_a_lost_prefix_bounds_the_capacity() -> None:
    evidence = unknown(held=0)
    for younger, capacity in ((900, 900), (1000, 900), (700, 700)):
        assert not gone(evidence, younger)
        assert evidence.capacity == capacity, "the tightest of all"


def test_a_cache_holds_no_less_than_it_has_held() -> None:
    evidence = unknown(held=0)
    for younger in (300, 500, 400):
        evidence.kept(younger)
    gone(evidence, younger=500)
    assert evidence.capacity is None
    gone(evidence, younger=501)
    assert evidence.capacity == 501


def test_hits_are_measured_that_were_idle_for_longest_of_late() -> None:
    """To measure takes time, and who was idle for less shows less."""
    evidence = unknown()
    seen = [(5.0, 0.0), (4.0, 1.0), (5.0, 2.0), (6.0, 3.0), (5.5, MEASURE_S), (1.0, MEASURE_S + 0.1), (0.5, MEASURE_S + 1)]
    assert [evidence.worth_measuring(*one) for one in seen] == [True, False, False, True, False, True, False]


def test_a_capacity_that_proved_too_small_grows() -> None:
    evidence = unknown()
    evidence.held_more(10**9)
    assert evidence.capacity is None, "unbounded as long as nothing was lost"
    evidence.capacity = 1
    for _ in range(100):
        before = evidence.capacity
        evidence.held_more(before)
        assert evidence.capacity > before * GROWTH


def test_what_was_not_forgotten_for_want_of_room_says_nothing_of_the_room() -> None:
    """After a purge, or a rest, the engine may well hold more than we believe, and every prompt would show it."""
    evidence = unknown(capacity=100)
    evidence.held_more(99)
    assert evidence.capacity == 100


def test_a_capacity_that_the_engine_tells_is_not_second_guessed() -> None:
    told = Evidence(learns_capacity=False, hits=True)
    assert not told.worth_measuring(500.0, 0.0)
    assert [gone(told, younger=10**6) for _ in ROW] == ROW, "we forget by it, so that nothing is gone for want of room"
    told.held_more(10**9)
    assert told.capacity is None


@pytest.mark.parametrize("size", [1, 17, 200])
def test_the_capacity_of_an_lru_cache_is_found(size: int) -> None:
    """Single blocks, asked for at random, on a cache of which every hit is measured."""
    chance, cache, evidence = random.Random(size), OrderedDict[int, None](), unknown(held=0)
    asked = OrderedDict[int, None]()  # what we believe: everything, in order of use
    for _ in range(3000):
        block = int(2 * size * chance.random() ** 2)
        if block in asked:
            younger = len(asked) - 1 - list(asked).index(block)
            if block in cache:
                evidence.kept(younger)
            else:
                gone(evidence, younger)
        for order in (cache, asked):
            order[block] = None
            order.move_to_end(block)
        if len(cache) > size:
            cache.popitem(last=False)
        if evidence.capacity is not None:
            assert evidence.held < size <= evidence.capacity
    assert size in (evidence.capacity, 1), "one block is never found again and lost"


events = st.one_of(
    st.tuples(st.just("hit"), st.floats(0, 500), st.integers(0, 10_000)),
    st.tuples(st.just("lost"), st.floats(0, 500), st.integers(0, 10_000)),
    st.tuples(st.just("part"), st.floats(0, 500), st.integers(0, 10_000)),
    st.tuples(st.just("purged"), st.floats(0, 500), st.just(0)),
    st.tuples(st.just("held_more"), st.just(0.0), st.integers(0, 10_000)),
)


@given(st.booleans(), st.lists(events, max_size=60))
def test_whatever_happens_a_capacity_is_above_all_that_was_held(learns: bool, story: list[tuple[str, float, int]]) -> None:
    evidence = Evidence(learns_capacity=learns)
    for kind, at, blocks in story:
        if kind == "hit":
            evidence.hit()
            evidence.kept(min(blocks, (evidence.capacity or 10_000) - 1))  # an engine that does not grow
        elif kind == "purged":
            evidence.purged(at)
        elif kind == "held_more":
            evidence.held_more(blocks)
        elif evidence.lost(blocks, kind == "lost", at):
            evidence.purged(at)
        assert evidence.capacity is None or (learns and evidence.capacity > evidence.held)
