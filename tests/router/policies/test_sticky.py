"""Rendezvous hashing with a bound on load: who stays, who moves, who is passed over."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router import Candidate, Prompt
from router.policies.sticky import BOUND, HEAD_BLOCKS, StickySessions
from tests.support.strategies import candidate_of, keys_of, prompt_of

names = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=9, unique=True)


def candidate(name: str, inflight: int = 0) -> Candidate:
    return candidate_of(name, inflight=inflight)


def of_session(session: str) -> Prompt:
    return Prompt(b"", 0, 1, "", session)


def first(prompt: Prompt, replicas: Sequence[str], seed: int = 0) -> str:
    return StickySessions().order(prompt, [candidate(name) for name in replicas], random.Random(seed))[0].replica


def homes(replicas: Sequence[str], sessions: int = 300) -> dict[int, str]:
    return {number: first(of_session(f"s{number}"), replicas) for number in range(sessions)}


def test_a_session_stays_whatever_chance_and_the_order_of_replicas() -> None:
    replicas = ["a", "b", "c", "d"]
    assert len({first(of_session("s"), order, seed) for seed in range(20) for order in (replicas, replicas[::-1])}) == 1


def test_a_session_counts_for_more_than_the_prompt() -> None:
    prompts = [Prompt(keys_of(bytes([number]) * 20), 20, 1, "", "s") for number in range(30)]
    assert len({first(prompt, "abcdef") for prompt in prompts}) == 1


def test_without_a_session_the_head_of_the_prompt_decides() -> None:
    head = b"h" * HEAD_BLOCKS
    together = {first(prompt_of(head + bytes([number]) * number), "abcdef") for number in range(30)}
    apart = {first(prompt_of(head[:-1] + bytes([number])), "abcdef") for number in range(30)}
    assert len(together) == 1
    assert apart == set("abcdef")


def test_what_belongs_nowhere_goes_anywhere() -> None:
    blind = Prompt(b"", 3, 64, "")
    assert {first(blind, "abcd", seed) for seed in range(40)} == set("abcd")


@settings(deadline=None, max_examples=50)
@given(names, st.text(min_size=1, max_size=8))
def test_one_that_joins_takes_about_its_share_and_nothing_else_moves(replicas: list[str], joins: str) -> None:
    assume(joins not in replicas)
    before, after = homes(replicas), homes([*replicas, joins])
    moved = [number for number in before if before[number] != after[number]]
    assert all(after[number] == joins for number in moved)
    share = 1 / (len(replicas) + 1)
    assert abs(len(moved) / 300 - share) < 5 * math.sqrt(share * (1 - share) / 300)


@settings(deadline=None, max_examples=50)
@given(names, st.data())
def test_one_that_leaves_hands_over_its_own_and_nothing_else_moves(replicas: list[str], data: st.DataObject) -> None:
    leaves = data.draw(st.sampled_from(replicas))
    before, after = homes(replicas), homes([name for name in replicas if name != leaves])
    assert {number for number in before if before[number] != after[number]} == {
        number for number in before if before[number] == leaves
    }


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.text(max_size=5), st.integers())
def test_nobody_gets_more_than_the_bound(loads: list[int], session: str, seed: int) -> None:
    candidates = [candidate(f"r{number}", load) for number, load in enumerate(loads)]
    order = StickySessions().order(of_session(session), candidates, random.Random(seed))
    assert sorted(order, key=str) == sorted(candidates, key=str)
    room = math.ceil(BOUND * (sum(loads) + 1) / len(loads))
    assert order[0].inflight + 1 <= room
    full = [one.inflight + 1 > room for one in order]
    assert full == sorted(full), "the full ones are the last resort"
    free = StickySessions(bound=None).order(of_session(session or "x"), candidates, random.Random(seed))
    if session:
        assert [one for one in free if one.inflight + 1 <= room] == order[: full.count(False)], "the ranking is kept"


def test_the_bound_by_hand() -> None:
    """Four replicas, 7 requests in flight: with this one the mean is 2, and 2.5 is rounded up to 3."""
    home = first(of_session("s"), "abcd")
    rest = [name for name in "abcd" if name != home]
    for load, stays in ((2, True), (3, False)):
        others = dict(zip(rest, (7 - load - 2, 1, 1), strict=True))
        candidates = [candidate(name, load if name == home else others[name]) for name in "abcd"]
        assert (StickySessions().order(of_session("s"), candidates, random.Random(0))[0].replica == home) is stays


def test_one_hot_session_spreads_as_far_as_the_bound_demands() -> None:
    policy, loads = StickySessions(), Counter(dict.fromkeys("abcd", 0))
    for _ in range(100):
        candidates = [candidate(name, load) for name, load in loads.items()]
        loads[policy.order(of_session("hot"), candidates, random.Random(0))[0].replica] += 1
    assert max(loads.values()) == math.ceil(BOUND * 100 / 4)
    plain, taken = StickySessions(bound=None), Counter[str]()
    for _ in range(100):
        candidates = [candidate(name, taken[name]) for name in "abcd"]
        taken[plain.order(of_session("hot"), candidates, random.Random(0))[0].replica] += 1
    assert list(taken.values()) == [100]
