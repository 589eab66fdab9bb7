from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.learning.evidence import GROWTH, MEASURE_S, RESTART_MISSES, Evidence, Miss

ROW = [False] * (RESTART_MISSES - 1) + [True]


def unknown(**known: Any) -> Evidence:
    """Of a replica that does not report the size of its cache, but reports cached tokens."""
    return Evidence(learns_capacity=True, **{"hits": True, "held": 100, **known})


numbers = itertools.count()


def miss(younger: int | None = 50, *, nothing: bool = True, sent: float = 1.0, client: int = 1, prefix: bytes = b"") -> Miss:
    """A miss that by default cannot be for want of room; of another prompt each time."""
    return Miss(client, prefix or str(next(numbers)).encode(), sent, younger, 10_000, nothing)


def gone(evidence: Evidence, younger: int = 50, cached_nothing: bool = True, sent: float = 1.0) -> bool:
    """Of a client that is alone."""
    return evidence.lost(miss(younger, nothing=cached_nothing, sent=sent), True)


# -- restarts


def test_only_a_row_of_misses_makes_a_restart() -> None:
    evidence = unknown()
    assert [gone(evidence) for _ in ROW] == ROW
    assert evidence.capacity is None, "there was no evidence of its size"


@pytest.mark.parametrize("confirmed", ["", "hit", "part"])
def test_one_miss_suffices_until_what_was_restored_is_confirmed(confirmed: str) -> None:
    evidence = unknown(on_probation=True)
    if confirmed == "hit":
        evidence.hit()
    elif confirmed:
        assert not gone(evidence, cached_nothing=False)
    assert evidence.lost(miss(younger=1000), False) is not bool(confirmed), "whether or not a full cache explains it"
    assert not unknown(on_probation=True, hits=False).lost(miss(), True), "it reports no hits"


@pytest.mark.parametrize("between", ["hit", "part"])
def test_a_token_that_was_there_ends_the_row(between: str) -> None:
    evidence = unknown()
    for _ in range(5):
        assert not any(gone(evidence) for _ in range(RESTART_MISSES - 1))
        if between == "hit":
            evidence.hit()
        else:
            assert not gone(evidence, cached_nothing=False)


def test_a_hit_of_a_part_shows_that_hits_are_reported() -> None:
    evidence = unknown(hits=False)
    assert not any(gone(evidence) for _ in range(10))
    gone(evidence, cached_nothing=False)
    assert [gone(evidence) for _ in ROW] == ROW


def test_what_may_be_for_want_of_room_is_no_sign_of_a_restart() -> None:
    evidence = unknown()
    assert not any(gone(evidence, younger=101) for _ in range(10))
    assert [gone(evidence, younger=100) for _ in ROW] == ROW


def test_what_was_sent_before_the_purge_is_no_evidence_of_the_new_cache() -> None:
    evidence = unknown()
    gone(evidence)
    evidence.purged(5.0)
    evidence.hit()
    assert not any(gone(evidence, younger, sent=sent) for sent in (1.0, 4.9, 5.0) * 5 for younger in (50, 200))
    assert evidence.capacity is None
    assert [gone(evidence, sent=5.1) for _ in ROW] == ROW


def test_a_replica_that_never_reports_a_hit_never_restarts() -> None:
    """It does not count, or does not cache: there is nothing to lose."""
    evidence = unknown(hits=False)
    assert not any(gone(evidence) for _ in range(50))
    evidence.hit()
    assert [gone(evidence, sent=3.0) for _ in ROW] == ROW
    evidence.purged(4.0)
    assert not any(gone(evidence, sent=5.0) for _ in range(50)), "nor does it twice, without a hit between"


def test_the_same_prompt_again_and_again_is_no_restart() -> None:
    evidence = unknown()
    assert not any(evidence.lost(miss(prefix=b"the same"), True) for _ in range(50))
    assert [gone(evidence) for _ in ROW[1:]] == ROW[1:], "two others"


def test_one_client_of_several_makes_no_restart() -> None:
    evidence = unknown()
    assert not any(evidence.lost(miss(client=1), False) for _ in range(50))
    assert evidence.lost(miss(client=2), False), "but two do"
    evidence.purged(2.0)
    evidence.hit()
    assert not any(evidence.lost(miss(client=client, sent=3.0), False) for client in (1, 2)), "of three prompts"
    assert evidence.lost(miss(client=1, sent=3.0), False)


def test_nobody_is_alone_with_what_was_restored() -> None:
    evidence = unknown()
    evidence.restored(5.0, hits=True)
    evidence.answered(1, 6.0, reports=None)
    assert not evidence.single_client(14.0, 10.0)
    assert evidence.single_client(16.0, 10.0)


def test_a_client_is_alone_when_no_other_came_for_a_while() -> None:
    evidence = unknown()
    assert evidence.single_client(0.0, 10.0)
    evidence.answered(1, 0.0, reports=None)
    assert evidence.single_client(0.0, 10.0), "the first"
    evidence.answered(2, 5.0, reports=None)
    evidence.answered(2, 14.0, reports=None)
    assert [evidence.single_client(now, 10.0) for now in (5.0, 14.9, 15.0, 15.1)] == [False, False, False, True]
    evidence.answered(1, 20.0, reports=None)
    assert not evidence.single_client(20.0, 10.0)


# -- how large a cache is


def test_one_observation_halves_a_capacity_at_most() -> None:
    evidence = unknown(held=0)
    capacities = []
    for _ in range(4):
        evidence.lost(Miss(1, b"x", 1.0, 10, 800, True), True)
        capacities.append(evidence.capacity)
    assert capacities == [400, 200, 100, 50]


def test_nobody_shrinks_a_capacity_twice_in_a_row_that_others_use() -> None:
    evidence = unknown(held=0)
    capacities = []
    for client in (1, 1, 1, 2, 2, 1):
        evidence.lost(Miss(client, b"x", 1.0, 10, 800, True), False)
        capacities.append(evidence.capacity)
    assert capacities == [400, 400, 400, 200, 200, 100]


def test_too_much_to_count_is_no_evidence() -> None:
    evidence = unknown()
    assert not any(evidence.lost(miss(None), True) for _ in range(10))
    assert evidence.capacity is None
    evidence.kept(None)
    assert evidence.held == 100
    reported = Evidence(learns_capacity=False, hits=True)
    assert [reported.lost(miss(None), True) for _ in ROW] == ROW, "where we forget by the engine's word, nobody counts"


def test_a_lost_prefix_bounds_the_capacity() -> None:
    evidence = unknown(held=0)
    for younger, capacity in ((9000, 9000), (9900, 9000), (7000, 7000)):
        assert not gone(evidence, younger)
        assert evidence.capacity == capacity, "the tightest of all"


def test_a_cache_holds_no_less_than_it_has_held() -> None:
    evidence = unknown(held=0)
    for younger in (300, 500, 400):
        evidence.kept(younger)
    evidence.lost(Miss(1, b"x", 1.0, 500, 700, True), True)
    assert evidence.capacity is None
    evidence.lost(Miss(1, b"x", 1.0, 501, 700, True), True)
    assert evidence.capacity == 501


def test_hits_are_measured_that_were_idle_for_longest_of_late() -> None:
    """To measure takes time, and who was idle for less shows less."""
    evidence = unknown()
    seen = [(5.0, 0.0), (4.0, 1.0), (5.0, 2.0), (6.0, 3.0), (5.5, MEASURE_S), (1.0, MEASURE_S + 0.1), (0.5, MEASURE_S + 1)]
    assert [evidence.worth_measuring(*one) for one in seen] == [True, False, False, True, False, True, False]


def test_a_capacity_that_proved_too_small_grows() -> None:
    evidence = unknown()
    evidence.held_more(10**9, 1)
    assert evidence.capacity is None, "unbounded as long as nothing was lost"
    evidence.capacity = 1
    for _ in range(100):
        before = evidence.capacity
        evidence.held_more(before, 1)
        assert evidence.capacity > before * GROWTH


def test_a_capacity_is_the_limit_where_no_further_block_fits_and_grows_by_a_block_at_least() -> None:
    evidence = unknown(capacity=100)
    evidence.held_more(36, 64)
    assert evidence.capacity == 100, "one more would have fit"
    evidence.held_more(37, 64)
    assert evidence.capacity == 110 + 64


def test_what_was_not_forgotten_for_want_of_room_is_no_evidence_of_the_room() -> None:
    """After a purge, or a rest, the engine may well hold more than we believe, and every prompt would show it."""
    evidence = unknown(capacity=100)
    evidence.held_more(99, 1)
    assert evidence.capacity == 100


def test_a_capacity_that_the_engine_reports_is_not_second_guessed() -> None:
    reported = Evidence(learns_capacity=False, hits=True)
    assert not reported.worth_measuring(500.0, 0.0)
    assert [gone(reported, younger=10**6) for _ in ROW] == ROW, "we forget by it, so that nothing is gone for want of room"
    reported.held_more(10**9, 1)
    assert reported.capacity is None


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
                evidence.lost(miss(younger), True)
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
            evidence.held_more(blocks, 1)
        elif evidence.lost(miss(blocks, nothing=kind == "lost", sent=at), True):
            evidence.purged(at)
        assert evidence.capacity is None or (learns and evidence.capacity > evidence.held)
