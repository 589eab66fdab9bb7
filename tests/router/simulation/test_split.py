"""The simulated fleet with prefillers: small cases by hand, laws on random workloads."""

from __future__ import annotations

import random

import pytest

from router import Candidate, Router
from router.pricing.legs import CHEAPER, SHORT, local_reason
from router.simulation.fleet import FleetSpec, ServedRequest
from router.simulation.split import SplitPlacement, SplitSimulation
from router.simulation.workloads import Arrival, OpenLoop
from router.types import Cost
from tests.router.simulation.test_fleet import request_of

# Blocks of 10 tokens: a second each; a transfer takes a tenth of that.
SPEC = FleetSpec(replicas=2, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0, prefillers=1, transfer_rate=100.0)


def replay(spec: FleetSpec, *arrivals: Arrival, local_tokens: int = 0, seed: int = 0) -> tuple[list[ServedRequest], Router]:
    router = Router(policy="cost", ttl_s=600.0, memory_bytes=1 << 26, chance=random.Random(seed))
    simulation = SplitSimulation(spec, OpenLoop(arrivals), SplitPlacement(router, spec, local_tokens))
    served = sorted(simulation.run(), key=lambda one: one.arrived)
    router.check()
    assert router.ledger.open_leases == 0
    return served, router


def test_a_prompt_is_computed_transferred_and_then_generates() -> None:
    (one,), router = replay(SPEC, (0.0, request_of("abcd", output=10)))
    assert one.first_token == pytest.approx(4.0 + 0.4)
    assert one.finished == pytest.approx(4.4 + 5.0)
    assert one.replica == 1
    assert router.held_tokens("r0") == router.held_tokens("r1") == 40, "both hold it now"


def test_a_short_prompt_is_computed_by_the_decoder() -> None:
    served, router = replay(SPEC, (0.0, request_of("ab")), local_tokens=20)
    assert served[0].first_token == pytest.approx(2.0)
    assert router.held_tokens("r0") == 0


def test_a_conversation_that_its_decoder_holds_needs_no_prefiller() -> None:
    served, _ = replay(SPEC, (0.0, request_of("abcd")), (20.0, request_of("abcde")), local_tokens=10)
    assert served[1].first_token == pytest.approx(20.0 + 1.0)
    assert served[1].cached_tokens == 40


def test_a_queue_at_the_prefiller_is_relieved_by_idle_decoders() -> None:
    """Without that, the last of them would wait for all others."""
    arrivals = [(0.0, request_of(text * 10)) for text in "abcdefgh"]
    served, _ = replay(FleetSpec(replicas=4, kv_tokens=10_000, prefill_rate=10.0, prefillers=1), *arrivals)
    assert max(one.first_token for one in served) < 50.0


def test_the_same_requests_give_the_same_run_and_all_are_served() -> None:
    chance = random.Random(7)
    texts = ["".join(chance.choice("ab") for _ in range(chance.randint(1, 30))) for _ in range(200)]
    arrivals = [(chance.random() * 400, request_of(text, output=chance.randint(0, 50))) for text in texts]
    arrivals.sort(key=lambda one: one[0])
    spec = FleetSpec(replicas=5, kv_tokens=300, prefill_rate=50.0, decode_rate=20.0, batch_limit=8, prefillers=2)
    first, second = (replay(spec, *arrivals, local_tokens=30)[0] for _ in range(2))
    assert [(one.first_token, one.replica, one.cached_tokens) for one in first] == [
        (one.first_token, one.replica, one.cached_tokens) for one in second
    ]
    assert len(first) == 200
    assert all(one.arrived <= one.first_token <= one.finished for one in first)
    assert {one.replica for one in first} <= {2, 3, 4}, "prefillers answer nobody"


def candidate(uncached: int, *, queue_s: float = 0.0, decoding: int = 0, rate: float = 100.0) -> Candidate:
    price = Cost(queue_s, uncached / rate, 0.0, 0.0, 0.0, 0.0)
    return Candidate("r", 0, 0, uncached, 0, 0, decoding, 0, rate, price)


def test_the_rule() -> None:
    def reason(decoder: Candidate, prefiller: Candidate) -> str:
        return local_reason(decoder, prefiller, 50)

    assert reason(candidate(50), candidate(1000)) == SHORT
    assert reason(candidate(1000), candidate(1000)) == "", "idle"
    assert reason(candidate(1000), candidate(1000, queue_s=10.1)) == CHEAPER, "the prefiller is busy"
    assert reason(candidate(1000, decoding=9), candidate(1000, queue_s=10.1)) == "", "so is the decoder"
    assert reason(candidate(1000, decoding=9), candidate(1000, queue_s=95.0)) == CHEAPER
    assert reason(candidate(100), candidate(1000)) == CHEAPER, "the decoder holds most of it"
    assert reason(candidate(100, queue_s=9.0), candidate(1000)) == ""
