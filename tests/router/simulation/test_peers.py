"""Each peer's rule, on cases worked by hand that any of the other rules would decide otherwise."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router import POLICIES, Candidate, Outcome, Replica, Router
from router.simulation.peers import PEERS
from router.simulation.policies import NAIVE, SIMULATED
from tests.support.strategies import candidate_of, prompt_of

PROMPT = prompt_of(b"x" * 100)  # 100 blocks of a token
RATE = 10_000.0


def candidate(name: str, matched: int = 0, *, booked: int = 0, inflight: int = 0, active: int = 0) -> Candidate:
    return candidate_of(
        name,
        matched_blocks=matched,
        matched_tokens=matched,
        uncached_tokens=100 - matched,
        booked_tokens=booked,
        inflight=inflight,
        active_tokens=active,
        prefill_rate=RATE,
    )


def taken(policy: str, *candidates: Candidate) -> str:
    """The first of the ranking, which no chance may change."""
    firsts = set()
    for number in range(10):
        order = PEERS[policy]().order(PROMPT, candidates, random.Random(number))
        assert sorted(order, key=str) == sorted(candidates, key=str)
        firsts.add(order[0].replica)
    [only] = firsts
    return only


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        # a match of more than 0.3 wins over any load that is not out of balance
        ([candidate("warm", 31, inflight=64, booked=10**6), candidate("idle")], "warm"),
        # 0.3 is not more than 0.3
        ([candidate("warm", 30, inflight=1), candidate("idle")], "idle"),
        # 65 more, and more than 1.5 times: the fewest requests, whatever is cached or booked
        ([candidate("warm", 100, inflight=65), candidate("idle", booked=10**6)], "idle"),
        # 65 more, but not 1.5 times as many
        ([candidate("warm", 100, inflight=265), candidate("idle", inflight=200)], "warm"),
        ([candidate("warm", 100, inflight=301), candidate("idle", inflight=200)], "idle"),
        # the longest match of several
        ([candidate("warm", 40), candidate("warmer", 60, inflight=9), candidate("idle")], "warmer"),
        # cold: requests count, not tokens
        ([candidate("few", inflight=1, booked=9000), candidate("many", inflight=2)], "few"),
    ],
)
def test_sglang(candidates: list[Candidate], expected: str) -> None:
    assert taken("sglang", *candidates) == expected


def test_dynamo_by_the_example_of_its_documentation() -> None:
    """Prefill 8, 5, 2 blocks and decode 10, 5, 9: the costs are 18, 10, 11."""
    one, two, three = (candidate("one", active=10), candidate("two", active=5), candidate("three", active=9))
    workers = [one._replace(uncached_tokens=8), two._replace(uncached_tokens=5), three._replace(uncached_tokens=2)]
    assert taken("dynamo", *workers) == "two"


def test_dynamo_counts_what_is_booked_and_what_decodes_but_not_requests() -> None:
    assert taken("dynamo", candidate("a", 90, booked=100, active=500), candidate("b", 0, active=505, inflight=50)) == "b"
    assert taken("dynamo", candidate("a", 90, booked=100, active=500), candidate("b", 0, active=515, inflight=0)) == "a"


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        # 0.8 of the blocks is sticky: only these are considered, whatever their load
        ([candidate("warm", 80, booked=180_000), candidate("idle")], "warm"),
        # 0.79 is not: token load alone
        ([candidate("warm", 79, booked=80), candidate("idle")], "idle"),
        ([candidate("warm", 79, booked=78), candidate("idle")], "warm"),
        # more than 18 s behind the best of the others: no longer sticky
        ([candidate("warm", 80, booked=180_001), candidate("idle")], "idle"),
        # the best of the sticky counts
        ([candidate("full", 100, booked=400_000), candidate("warm", 80, booked=9000), candidate("idle")], "warm"),
        # within the sticky: uncached tokens with our own, not the longest match
        ([candidate("longer", 100, booked=30), candidate("shorter", 85)], "shorter"),
        # all sticky: nobody to be compared with
        ([candidate("a", 90, booked=10**7), candidate("b", 90, booked=10**7 + 1)], "a"),
    ],
)
def test_llm_d(candidates: list[Candidate], expected: str) -> None:
    assert taken("llm_d", *candidates) == expected


def test_lmetric_multiplies() -> None:
    """(50 + 100) x 4 = 600 against (240 + 50) x 2 = 580: neither the fewest tokens nor the longest match, nor the sum."""
    few_tokens = candidate("few tokens", 0, booked=50, inflight=3)
    few_requests = candidate("few requests", 50, booked=240, inflight=1)
    assert taken("lmetric", few_tokens, few_requests) == "few requests"
    assert taken("lmetric", few_tokens, few_requests._replace(inflight=2)) == "few tokens"
    assert taken("dynamo", few_tokens, few_requests) == "few tokens"
    assert taken("lmetric", candidate("warm", 20), candidate("cold", 0)) == "warm", "this request counts in the batch"


def test_a_session_hash_knows_no_load() -> None:
    homes = {taken("session", candidate("a", inflight=load), candidate("b", inflight=9 - load)) for load in range(10)}
    assert len(homes) == 1


@pytest.mark.parametrize("policy", ["sglang", "dynamo", "llm_d", "lmetric"])
def test_ties_are_broken_by_chance(policy: str) -> None:
    firsts = {
        PEERS[policy]().order(PROMPT, [candidate(name) for name in "abc"], random.Random(n))[0].replica for n in range(30)
    }
    assert firsts == set("abc")


def test_a_peers_rule_runs_in_the_production_router() -> None:
    router = Router(policy="sglang", policies=SIMULATED, ttl_s=60.0, memory_bytes=1 << 20, chance=random.Random(1))
    assert router.policy_name == "sglang"
    for name in ("a", "b"):
        router.add(Replica(name))
    first = router.choose(PROMPT, ["a", "b"], 0.0)
    for _ in range(50):  # the warm one, although the other is idle
        assert router.choose(PROMPT, ["a", "b"], 0.0).chosen.replica == first.chosen.replica
    first.close(Outcome(True, 100, 0), 1.0)
    router.check()


def test_peers_and_policies_have_different_names() -> None:
    assert not set(PEERS) & set(POLICIES)
    assert not set(NAIVE) & {*PEERS, *POLICIES}
    assert set(SIMULATED) == {*POLICIES, *NAIVE, *PEERS}


def test_longest_prefix_looks_at_nothing_else() -> None:
    policy, chance = NAIVE["longest_prefix"](), random.Random(5)
    warm, idle = candidate_of("a", matched_blocks=3, seconds=9, inflight=99), candidate_of("b", matched_blocks=2)
    assert {policy.order(PROMPT, [warm, idle], chance)[0].replica for _ in range(9)} == {"a"}


@pytest.mark.parametrize("policy", sorted(NAIVE))
def test_ties_of_naive_policies_are_fair(policy: str) -> None:
    made, chance = NAIVE[policy](), random.Random(5)
    heads = Counter(made.order(PROMPT, [candidate(name) for name in "abcd"], chance)[0].replica for _ in range(800))
    assert all(140 < heads[name] < 260 for name in "abcd")
