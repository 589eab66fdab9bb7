from __future__ import annotations

import random
from collections import Counter

import pytest

from router import POLICIES, Candidate, Cost
from router.cost import DECODE_TOKENS, DUPLICATE_WEIGHT, cost


def candidate(name: str, *, seconds: float = 0.0, inflight: int = 0) -> Candidate:
    return Candidate(name, 0, 0, 0, 0, inflight, 0, 1000.0, Cost(0.0, seconds, 0.0, 0.0, 0.0))


def heads(policy: str, candidates: list[Candidate], rounds: int) -> Counter[str]:
    """How often each candidate was first, each head being taken."""
    ranked, chance, taken = POLICIES[policy](), random.Random(5), Counter[str]()
    for _ in range(rounds):
        order = ranked.order(candidates, chance)
        assert sorted(order, key=str) == sorted(candidates, key=str), "a ranking holds every candidate once"
        ranked.booked(order[0].replica)
        taken[order[0].replica] += 1
    return taken


def test_cost_takes_the_cheapest() -> None:
    assert heads("cost", [candidate("a", seconds=2), candidate("b", seconds=1), candidate("c", seconds=3)], 10) == {"b": 10}


def test_least_loaded_takes_the_emptiest() -> None:
    assert heads("least_loaded", [candidate("a", inflight=2), candidate("b", inflight=3), candidate("c")], 10) == {"c": 10}


def test_round_robin_is_fair_when_replicas_come_and_go() -> None:
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    assert set(heads("round_robin", [a, b, c], 300).values()) == {100}
    policy, chance = POLICIES["round_robin"](), random.Random(5)
    taken = []
    for group in ([a, b], [a, b], [a, b, c], [a, b, c], [a, b, c], [b, c], [b, c]):
        taken.append(policy.order(group, chance)[0].replica)
        policy.booked(taken[-1])
    assert sorted(taken[:2]) == ["a", "b"]
    assert taken[2] == "c", "a newcomer has waited longest"
    assert sorted(taken[2:5]) == ["a", "b", "c"]
    assert sorted(taken[5:]) == ["b", "c"]


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "random"])
def test_ties_are_broken_by_chance(policy: str) -> None:
    taken = heads(policy, [candidate(name) for name in "abcd"], 800)
    assert all(140 < taken[name] < 260 for name in "abcd")


def test_a_dry_run_does_not_take_a_turn() -> None:
    policy, chance = POLICIES["round_robin"](), random.Random(5)
    policy.booked("a")
    for _ in range(3):
        assert policy.order([candidate("a"), candidate("b")], chance)[0].replica == "b"


def test_the_cost_is_in_seconds_and_adds_up() -> None:
    parts = cost(booked=3000, uncached=1000, duplicate=500, decoding=4, prefill_rate=2000.0, arrival_rate=2.0)
    assert parts == Cost(
        queue_s=1.5,
        prefill_s=0.5,
        others_s=2.0 * (1.5 * 0.5 + 0.5 * 0.5 / 2),
        duplicate_s=DUPLICATE_WEIGHT * 0.25,
        decode_s=4 * DECODE_TOKENS / 2000,
    )
    assert parts.total_s == pytest.approx(1.5 + 0.5 + 1.75 + 0.25 * DUPLICATE_WEIGHT + 4 * DECODE_TOKENS / 2000)
