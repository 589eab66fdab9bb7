from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from router import POLICIES, Candidate, Outcome, Prompt, Replica, Router
from router.policies.least_cost import LeastCost
from router.types import Random
from tests.support.strategies import candidate_of, prompt_of

PROMPT = prompt_of(b"")


def candidate(name: str, *, seconds: float = 0.0, inflight: int = 0, matched: int = 0) -> Candidate:
    return candidate_of(name, seconds=seconds, inflight=inflight, matched_blocks=matched)


def heads(policy: str, candidates: list[Candidate], rounds: int) -> Counter[str]:
    """How often each candidate was first, each head being taken."""
    ranked, chance, taken = POLICIES[policy](), random.Random(5), Counter[str]()
    for _ in range(rounds):
        order = ranked.order(PROMPT, candidates, chance)
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
        taken.append(policy.order(PROMPT, group, chance)[0].replica)
        policy.booked(taken[-1])
    assert sorted(taken[:2]) == ["a", "b"]
    assert taken[2] == "c", "a newcomer has waited longest"
    assert sorted(taken[2:5]) == ["a", "b", "c"]
    assert sorted(taken[5:]) == ["b", "c"]


def test_power_of_two_takes_the_emptier_of_two_random_ones() -> None:
    taken = heads("power_of_two", [candidate("a", inflight=1), candidate("b", inflight=2), candidate("c", inflight=3)], 900)
    assert set(taken) == {"a", "b"}, "the fullest of three is never the emptier of two"
    assert 520 < taken["a"] < 680, "in two of three pairs"
    assert heads("power_of_two", [candidate("a")], 5) == {"a": 5}


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "power_of_two", "sticky"])
def test_ties_are_broken_by_chance(policy: str) -> None:
    taken = heads(policy, [candidate(name) for name in "abcd"], 800)
    assert all(140 < taken[name] < 260 for name in "abcd")


def test_a_dry_run_does_not_take_a_turn() -> None:
    policy, chance = POLICIES["round_robin"](), random.Random(5)
    policy.booked("a")
    for _ in range(3):
        assert policy.order(PROMPT, [candidate("a"), candidate("b")], chance)[0].replica == "b"


class Alphabetical:
    """A policy that nobody would use: the first name of all."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def order(self, prompt: Prompt, candidates: Sequence[Candidate], chance: Random) -> list[Candidate]:
        return sorted(candidates, key=lambda one: one.replica)

    def booked(self, replica: str) -> None:
        self.taken.append(replica)


def test_a_policy_is_added_by_passing_it() -> None:
    made: list[Alphabetical] = []

    def alphabetical() -> Alphabetical:
        made.append(Alphabetical())
        return made[-1]

    policies = {**POLICIES, "alphabetical": alphabetical}
    options: dict[str, Any] = {"ttl_s": 60.0, "memory_bytes": 1 << 20}
    router = Router(policy="alphabetical", policies=policies, chance=random.Random(1), **options)
    for name in "cab":
        router.add(Replica(name))
    decision, ranking = router.rank(PROMPT, "cab", 0.0)
    assert [candidate.replica for candidate in ranking] == ["a", "b", "c"]
    assert made[0].taken == [], "a dry run books nothing"
    bookings = [router.choose(PROMPT, "cab", 0.0) for _ in range(3)]
    assert {booking.chosen.replica for booking in bookings} == {decision.best.replica} == {"a"}
    bookings[0].move(["b", "c"], 1.0)
    assert made[0].taken == ["a", "a", "a", "b"]
    router.retune(policy="cost", **options)
    router.choose(PROMPT, "cab", 0.0)
    assert len(made[0].taken) == 4
    with pytest.raises(KeyError):
        router.retune(policy="of nobody", **options)


def test_least_cost_under_any_name_finds_the_cheapest_and_pays_rent() -> None:
    """What the router does for its default policy goes with the policy, not with its name."""
    router = Router(policy="x", policies={"x": LeastCost}, ttl_s=60.0, memory_bytes=1 << 20, chance=random.Random(1))
    for name in ("a", "b"):
        router.add(Replica(name))
    prompt = prompt_of(bytes(100))
    router.choose(prompt, ["a"], 0.0).close(Outcome(True), 0.0)
    waiting = router.choose(prompt_of(bytes([1]) * 100), ["a"], 1.0)
    assert router.choose(prompt, ["a", "b"], 1.0).chosen.replica == "a"
    assert len(router.rents) == 1, "it waits behind another one while b is idle"
    waiting.close(Outcome(ok=False), 2.0)
