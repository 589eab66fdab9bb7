"""The simulated fleet: small cases by hand, laws on random workloads, and one real hour of chat."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Outcome, Prompt, Router
from router.simulation.fleet import (
    Cache,
    FleetSpec,
    Result,
    RouterPlacement,
    ServedRequest,
    SharedQueue,
    Simulation,
    remember,
    summary,
)
from router.simulation.gateways import Gateways
from router.simulation.policies import SIMULATED
from router.simulation.workloads import Arrival, ClosedLoop, MeasuredTokens, OpenLoop, SimulatedRequest, mooncake
from tests.support.paths import TRACES
from tests.support.strategies import keys_of, letters

CONVERSATION = TRACES / "mooncake_conversation.jsonl.gz"
ONE = FleetSpec(replicas=1, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0)  # blocks of 10 tokens: one a second
POOL = 1 << 30


def request_of(text: str, output: int = 0, extra: int = 0) -> SimulatedRequest:
    """A prompt of one block of 10 tokens for each letter, and `extra` tokens of a block that is not full."""
    return SimulatedRequest(Prompt(keys_of(text.encode()), 10 * len(text) + extra, 10, ""), output, "")


class Scripted:
    """A placement that follows a script, and keeps what it receives."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.received: list[tuple[str, SimulatedRequest, float]] = []
        self.outcomes: list[Outcome] = []
        self.reports: list[tuple[int, int, int, float]] = []

    def place(self, request: SimulatedRequest, now: float) -> tuple[int, SimulatedRequest]:
        return self.numbers.pop(0) if self.numbers else 0, request

    def booking_of(self, handle: SimulatedRequest) -> None:
        return None

    def first_token(self, handle: SimulatedRequest, now: float) -> None:
        self.received.append(("first", handle, now))

    def finished(self, handle: SimulatedRequest, outcome: Outcome, now: float) -> None:
        self.received.append(("end", handle, now))
        self.outcomes.append(outcome)

    def reported(self, replica: int, running: int, waiting: int, now: float) -> None:
        self.reports.append((replica, running, waiting, now))


def router_of(policy: str = "cost", number: int = 0, ttl_s: float = 600.0) -> Router:
    return Router(policy=policy, policies=SIMULATED, ttl_s=ttl_s, memory_bytes=1 << 26, chance=random.Random(number))


def replay(
    spec: FleetSpec, arrivals: Sequence[Arrival], policy: str = "", number: int = 0
) -> tuple[list[ServedRequest], list[float]]:
    """With a policy of the production router, a peer's rule in it, or on the shared bound ("")."""
    source = OpenLoop(arrivals)
    if not policy:
        simulation = Simulation(spec, source, SharedQueue(), shared=True)
        return list(simulation.run()), simulation.busy_s
    placement = RouterPlacement(router_of(policy, number), spec)
    simulation = Simulation(spec, source, placement)
    served = list(simulation.run())
    placement.router.check()
    assert placement.router.ledger.open_leases == 0
    return served, simulation.busy_s


def by_hand(spec: FleetSpec, *arrivals: Arrival, on: Sequence[int] = ()) -> list[ServedRequest]:
    """In order of arrival."""
    return sorted(Simulation(spec, OpenLoop(arrivals), Scripted(*on)).run(), key=lambda one: one.arrived)


def first_tokens(served: Sequence[ServedRequest]) -> list[float]:
    return [one.first_token for one in served]


# -- by hand


def test_prompts_are_prefilled_one_after_the_other() -> None:
    served = by_hand(ONE, (0.0, request_of("aaa")), (1.0, request_of("b")), (2.0, request_of("cc")), (9.0, request_of("d")))
    assert first_tokens(served) == [3.0, 4.0, 6.0, 10.0]


def test_sequences_decode_beside_each_other() -> None:
    served = by_hand(ONE, (0.0, request_of("a", output=10)), (0.5, request_of("b", output=1)))
    assert [(one.first_token, one.finished) for one in served] == [(1.0, 6.0), (2.0, 2.5)]


def test_requests_come_out_in_the_order_in_which_they_finish() -> None:
    long, short = request_of("a", output=10), request_of("b", output=1)
    assert [one.request for one in Simulation(ONE, OpenLoop([(0.0, long), (0.5, short)]), Scripted()).run()] == [short, long]


def test_a_full_batch_lets_the_queue_wait() -> None:
    spec = FleetSpec(replicas=1, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0, batch_limit=2)
    served = by_hand(spec, (0.0, request_of("a", output=8)), (0.1, request_of("b", output=20)), (0.2, request_of("c")))
    assert first_tokens(served) == [1.0, 2.0, 6.0], "the third begins when the first ends, at 5"


def test_a_cached_prefix_is_not_computed_again() -> None:
    served = by_hand(
        ONE, (0.0, request_of("aab")), (10.0, request_of("aac")), (20.0, request_of("aab")), (30.0, request_of("aab", extra=5))
    )
    assert [one.cached_tokens for one in served] == [0, 20, 29, 30], "the last token is always computed"
    assert first_tokens(served) == pytest.approx([3.0, 11.0, 20.1, 30.5])


def test_a_full_cache_forgets_what_was_used_longest_ago_leaves_first() -> None:
    spec = FleetSpec(replicas=1, kv_tokens=40, prefill_rate=10.0, decode_rate=2.0)
    served = by_hand(
        spec,
        (0.0, request_of("ab")),
        (10.0, request_of("xy")),
        (20.0, request_of("a", extra=1)),
        (30.0, request_of("zz")),
        (40.0, request_of("ab", extra=1)),
    )
    assert [one.cached_tokens for one in served] == [0, 0, 10, 0, 10], "zz took the places of b and y; a was used since"


def test_the_end_of_an_answer_keeps_its_prompt_fresh() -> None:
    spec = FleetSpec(replicas=1, kv_tokens=20, prefill_rate=10.0, decode_rate=1.0)
    served = by_hand(
        spec,
        (0.0, request_of("a", output=10)),
        (1.0, request_of("b")),
        (20.0, request_of("c")),
        (30.0, request_of("a", extra=1)),
    )
    assert [one.cached_tokens for one in served] == [0, 0, 0, 10]


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    spec = FleetSpec(replicas=1, kv_tokens=25, prefill_rate=10.0, decode_rate=1.0)
    assert [one.cached_tokens for one in by_hand(spec, (0.0, request_of("abc")), (10.0, request_of("abc")))] == [0, 20]


def test_replicas_are_as_fast_as_configured() -> None:
    spec = FleetSpec(replicas=2, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0, speeds=(1.0, 0.5))
    fast, slow = by_hand(spec, (0.0, request_of("aa", output=2)), (0.5, request_of("bb", output=2)), on=[0, 1])
    assert (fast.replica, fast.first_token, fast.finished) == (0, 2.0, 3.0)
    assert (slow.replica, slow.first_token, slow.finished) == (1, 4.5, 6.5)


def test_caches_are_apart_unless_they_are_shared() -> None:
    spec = FleetSpec(replicas=2, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0)
    arrivals = [(0.0, request_of("aa")), (1.0, request_of("b")), (1.5, request_of("aac"))]
    apart = by_hand(spec, *arrivals, on=[0, 1, 1])
    assert [one.cached_tokens for one in apart] == [0, 0, 0]
    shared, _ = replay(spec, arrivals)
    assert {one.request.prompt.blocks: (one.replica, one.cached_tokens, one.first_token) for one in shared} == {
        2: (0, 0, 2.0),
        1: (1, 0, 2.0),
        3: (0, 20, 3.0),
    }


def test_a_shared_queue_goes_to_the_replica_that_runs_least() -> None:
    spec = FleetSpec(replicas=3, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0)
    served, busy = replay(spec, [(2.0 * number, request_of(letter, output=100)) for number, letter in enumerate("abcdef")])
    assert [one.replica for one in served] == [0, 1, 2, 0, 1, 2]
    assert busy == [2.0, 2.0, 2.0]


def test_a_placement_receives_the_first_token_and_the_engines_count() -> None:
    placement, request = Scripted(), request_of("ab", output=4, extra=5)
    list(Simulation(ONE, OpenLoop([(0.0, request_of("a")), (5.0, request)]), placement).run())
    assert placement.received[2:] == [("first", request, 6.5), ("end", request, 8.5)]
    assert placement.outcomes == [Outcome(True, 10, 0), Outcome(True, 25, 10)]


def test_users_in_a_closed_loop_wait_for_the_simulated_answer() -> None:
    turns = [(0.0, request_of("a", output=2)), (5.0, request_of("ab", output=2))]
    source = ClosedLoop([turns], 1, 1e9, random.Random(1))
    first, second = Simulation(ONE, source, Scripted()).run()
    assert first.finished == pytest.approx(first.arrived + 2)
    assert second.arrived == first.finished + 5


def test_a_summary_by_hand() -> None:
    spec = FleetSpec(replicas=2, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0)
    simulation = Simulation(
        spec,
        OpenLoop([(0.0, request_of("aa", output=2)), (4.0, request_of("aab", output=2)), (9.0, request_of("c"))]),
        Scripted(0, 0, 1),
    )
    assert summary("scripted", spec, list(simulation.run()), simulation.busy_s) == Result(
        policy="scripted",
        replicas=2,
        kv_tokens=1000,
        requests=3,
        hit_ratio=20 / 60,
        ttft_mean_s=4 / 3,
        ttft_p50_s=1.0,
        ttft_p90_s=2.0,
        ttft_p99_s=2.0,
        e2e_mean_s=2.0,
        load_skew=1.5,
    )


def test_a_run_without_requests_has_no_summary() -> None:
    assert list(Simulation(ONE, OpenLoop([]), Scripted()).run()) == []
    with pytest.raises(ValueError, match="no request"):
        summary("scripted", ONE, [], [0.0])


# -- laws

fleets = st.builds(
    FleetSpec,
    replicas=st.integers(1, 4),
    kv_tokens=st.sampled_from([5, 30, 100, 1000]),
    prefill_rate=st.just(10.0),
    decode_rate=st.just(2.0),
    batch_limit=st.integers(1, 4),
)
requests = st.builds(lambda text, output: request_of(text.decode("latin1"), output, extra=5), letters, st.integers(0, 9))
workloads = st.lists(st.tuples(st.floats(0, 60), requests), min_size=1, max_size=40)
policies = st.sampled_from(["", *SIMULATED])


def tokens(served: Sequence[ServedRequest]) -> int:
    return sum(one.cached_tokens for one in served)


@settings(max_examples=100, deadline=None)
@given(fleets, workloads, policies)
def test_every_arrival_finishes_exactly_once_and_in_order(spec: FleetSpec, arrivals: list[Arrival], policy: str) -> None:
    served, busy = replay(spec, arrivals, policy)
    assert sorted(id(one.request) for one in served) == sorted(id(asked) for _, asked in arrivals)
    assert sorted(one.arrived for one in served) == sorted(at for at, _ in arrivals)
    for one in served:
        computed = one.request.prompt.units - one.cached_tokens
        assert 0 <= one.cached_tokens < one.request.prompt.units
        assert one.first_token >= one.arrived + computed / 10.0 - 1e-9
        assert one.finished == pytest.approx(one.first_token + one.request.output_tokens / 2.0)
    assert sum(busy) * 10.0 == pytest.approx(sum(one.request.prompt.units for one in served) - tokens(served))


@settings(max_examples=50, deadline=None)
@given(fleets, workloads, policies, st.integers(0, 5))
def test_a_run_is_determined_by_its_seed(spec: FleetSpec, arrivals: list[Arrival], policy: str, number: int) -> None:
    def history() -> list[tuple[float, float, float, int, int]]:
        served, _ = replay(spec, arrivals, policy, number)
        return [(one.arrived, one.first_token, one.finished, one.replica, one.cached_tokens) for one in served]

    assert history() == history()


@settings(max_examples=100, deadline=None)
@given(fleets, workloads, st.sampled_from(sorted(SIMULATED)))
def test_no_placement_computes_less_than_an_endless_shared_cache(spec: FleetSpec, arrivals: list[Arrival], policy: str) -> None:
    endless = FleetSpec(spec.replicas, POOL, spec.prefill_rate, spec.decode_rate, spec.batch_limit)
    assert tokens(replay(endless, arrivals)[0]) >= tokens(replay(spec, arrivals, policy)[0])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.floats(0, 30), min_size=1, max_size=40), st.sampled_from(sorted(SIMULATED)))
def test_no_placement_waits_less_than_a_shared_queue(replicas: int, times: list[float], policy: str) -> None:
    """Of equal, cold prompts. With unequal ones, first come, first served is not the best order, and no bound for a mean."""
    spec = FleetSpec(replicas, POOL, 10.0, 2.0, batch_limit=100)
    arrivals = [(at, request_of(chr(65 + number) * 2, output=3)) for number, at in enumerate(times)]
    shared, placed = (sum(first_tokens(replay(spec, arrivals, name)[0])) for name in ("", policy))
    assert shared <= placed + 1e-6


# -- an hour of chat


@pytest.mark.skipif(not CONVERSATION.exists(), reason="no recorded traces beside the repository")
def test_on_real_chat_the_cost_policy_comes_near_the_bound() -> None:
    with gzip.open(CONVERSATION) as lines:
        arrivals = list(mooncake([json.loads(line) for line in lines], random.Random(0), speed=2.0))
    spec = FleetSpec()
    cost, least_loaded, pooled = (summary(name, spec, *replay(spec, arrivals, name)) for name in ("cost", "least_loaded", ""))
    assert cost.ttft_mean_s < least_loaded.ttft_mean_s / 2
    assert cost.ttft_mean_s < pooled.ttft_mean_s * 1.25
    assert cost.hit_ratio > least_loaded.hit_ratio * 2
    assert cost.load_skew < 1.5


def measured_of(text: str, output: int) -> SimulatedRequest:
    request = request_of(text, output)
    return SimulatedRequest(request.prompt, output, "", MeasuredTokens(0, request.prompt.units))


def test_what_a_fleet_held_before_is_cached_and_known() -> None:
    held = [(3, measured_of("abc", 0))]  # a replica's number counts modulo theirs
    arrivals = [(1.0, measured_of("abcd", 0))]
    spec = dataclasses.replace(ONE, replicas=2)
    router = router_of()
    placement = RouterPlacement(router, spec)
    remember(router, spec, held)
    [served] = Simulation(spec, OpenLoop(arrivals), placement, held=held).run()
    assert (served.replica, served.cached_tokens) == (1, 35), "three blocks, and half of the next"
    router.check()


def test_a_router_begins_with_the_rate_that_it_had() -> None:
    router = router_of()
    RouterPlacement(router, dataclasses.replace(ONE, learned_rate=123.0))
    assert router.ledger.of("r0").rate.value == pytest.approx(123.0)


def test_running_requests_take_room_of_the_cache() -> None:
    cache = Cache(100)
    cache.take(measured_of("ab", 60), 0.0)
    cache.take(measured_of("cd", 0), 1.0)
    cache.take(measured_of("ef", 0), 2.0)
    assert cache.trie.match(measured_of("ab", 0).prompt.keys, 3.0) == {"": 1}, "60 of 100 tokens are an answer's: half is left"
    cache.release(measured_of("ab", 60), 4.0)
    assert cache.reserved == 0
    assert cache.trie.match(measured_of("ef", 0).prompt.keys, 5.0).get("", 0) == 2


# -- engines that do not share prefixes in flight


def burst(*, apart: bool, waits: bool) -> tuple[list[ServedRequest], list[float]]:
    """Six requests at once, 90 of 91 blocks in common, on two replicas of ten blocks a second."""
    spec = FleetSpec(replicas=2, kv_tokens=10_000, prefill_rate=100.0, apart=apart, waits=waits, learned_rate=100.0)
    router = Router(policy="cost", ttl_s=600.0, memory_bytes=POOL, chance=random.Random(1))
    source = OpenLoop([(number / 1000, request_of("h" * 90 + letter)) for number, letter in enumerate("abcdef")])
    simulation = Simulation(spec, source, RouterPlacement(router, spec))
    served = list(simulation.run())
    router.check()
    return served, simulation.busy_s


def test_a_burst_on_engines_that_compute_apart_is_computed_once_if_its_requests_wait() -> None:
    shared, apart, waiting = (burst(apart=apart, waits=waits) for apart, waits in ((False, False), (True, False), (True, True)))
    assert sum(shared[1]) == pytest.approx(9 + 6 * 0.1)
    assert sum(apart[1]) == pytest.approx(6 * 9.1)
    assert sum(waiting[1]) == pytest.approx(sum(shared[1]))
    firsts = [sorted(one.first_token for one in served) for served, _ in (shared, waiting)]
    assert firsts[1] == pytest.approx(firsts[0], abs=0.01)


def test_a_lone_request_waits_for_nothing_on_such_engines() -> None:
    for waits in (False, True):
        spec = FleetSpec(replicas=1, kv_tokens=10_000, prefill_rate=100.0, apart=True, waits=waits)
        router = Router(policy="cost", ttl_s=600.0, memory_bytes=POOL, chance=random.Random(1))
        source = OpenLoop([(0.0, request_of("h" * 90)), (20.0, request_of("h" * 90 + "abc"))])
        served = list(Simulation(spec, source, RouterPlacement(router, spec)).run())
        assert [one.first_token - one.arrived for one in served] == pytest.approx([9.0, 0.3])


@pytest.mark.parametrize("fronts", [0, 1])
def test_the_shortest_goes_first_where_prompts_are_computed_one_at_a_time(fronts: int) -> None:
    """Late binding, as in `warmroute simulate` (one front) and without it."""
    spec = FleetSpec(replicas=1, prefill_rate=10_000.0)

    def cold(letter: str, thousands: int) -> SimulatedRequest:
        return SimulatedRequest(Prompt(keys_of(letter.encode() * thousands), 1000 * thousands, 1000, ""), 0, letter)

    first = [(0.0, cold(letter, 10)) for letter in "abcdefgh"]  # the proof
    then = [(20.0, cold("i", 30)), (20.1, cold("j", 60)), (20.2, cold("k", 10)), (20.3, cold("l", 20))]
    alone, front = RouterPlacement(router_of(), spec), Gateways([router_of()], spec, delay_s=0.0, chance=random.Random(1))
    served = list(Simulation(spec, OpenLoop([*first, *then]), front if fronts else alone).run())
    assert [one.request.session for one in served[len(first) :]] == ["i", "k", "l", "j"]
    assert [one.first_token for one in served[len(first) :]] == pytest.approx([23.0, 24.0, 26.0, 32.0])


def test_engines_report_their_load_and_serve_requests_of_others() -> None:
    placement = Scripted()
    foreign = [(0.5, 0, request_of("xy")), (0.6, 0, request_of("z"))]
    spec = dataclasses.replace(ONE, reports_s=1.0)
    served = list(Simulation(spec, OpenLoop([(0.7, request_of("a"))]), placement, foreign=foreign).run())
    assert [(one.request, one.first_token) for one in served] == [(request_of("a"), pytest.approx(4.5))]
    assert placement.reports[:2] == [(0, 0, 0, 0.0), (0, 1, 2, 1.0)]
