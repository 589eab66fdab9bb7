"""Several gateways in the simulation: when one knows what another has booked."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Outcome, Router
from router.simulation.fleet import FleetSpec, RouterPlacement, Simulation
from router.simulation.gateways import NEVER, Gateways
from router.simulation.workloads import Arrival, OpenLoop
from tests.router.simulation.test_fleet import fleets, request_of, router_of, workloads

SPEC = FleetSpec(replicas=2, kv_tokens=1000, prefill_rate=10.0, decode_rate=2.0)  # a block of 10 tokens takes a second


class InTurn:
    """The requests come to the first of two gateways, the second, the first, ..."""

    def __init__(self) -> None:
        self.numbers = cycle([0.0, 0.5])

    def random(self) -> float:
        return next(self.numbers)


def two_gateways(delay_s: float) -> tuple[Gateways, list[Router]]:
    routers = [router_of(number=number) for number in range(2)]
    return Gateways(routers, SPEC, delay_s=delay_s, chance=InTurn()), routers


@pytest.mark.parametrize(("delay_s", "known"), [(0.0, 3), (4.0, 3), (9.0, 3), (30.0, 0), (NEVER, 0)])
def test_a_booking_is_known_to_the_other_gateway_after_the_delay(delay_s: float, known: int) -> None:
    placement, (first, second) = two_gateways(delay_s)
    arrivals: list[Arrival] = [(0.0, request_of("abc")), (10.0, request_of("xy"))]
    list(Simulation(SPEC, OpenLoop(arrivals), placement).run())
    abc = request_of("abc").prompt
    assert first.rank(abc, SPEC.names, 20.0)[0].best.matched_blocks == 3
    assert second.rank(abc, SPEC.names, 20.0)[0].best.matched_blocks == known


@pytest.mark.parametrize(("delay_s", "busy"), [(0.5, 1), (2.0, 0)])
def test_running_requests_of_the_other_gateway_count_after_the_delay(delay_s: float, busy: int) -> None:
    placement, (_, second) = two_gateways(delay_s)
    placement.place(request_of("abcdefgh"), 0.0)
    placement.place(request_of("x"), 1.0)
    assert sum(load.remote_inflight for load in second.ledger.loads.values()) == busy
    assert second.ledger.open_leases == busy + 1


@settings(max_examples=50, deadline=None)
@given(fleets, workloads, st.integers(0, 5))
def test_one_gateway_is_a_router_by_itself(spec: FleetSpec, arrivals: list[Arrival], number: int) -> None:
    def history(placement: Gateways | RouterPlacement) -> list[tuple[float, int, int]]:
        return [(one.finished, one.replica, one.cached_tokens) for one in Simulation(spec, OpenLoop(arrivals), placement).run()]

    alone = RouterPlacement(router_of(number=number), spec)
    one = Gateways([router_of(number=number)], spec, delay_s=0.1, chance=random.Random(number))
    assert history(one) == history(alone)


@settings(max_examples=50, deadline=None)
@given(fleets, workloads, st.integers(1, 4), st.sampled_from([0.0, 0.5, 30.0, NEVER]))
def test_what_is_over_is_over_for_every_gateway(
    spec: FleetSpec, arrivals: list[Arrival], gateways: int, delay_s: float
) -> None:
    routers = [router_of(number=number) for number in range(gateways)]
    placement = Gateways(routers, spec, delay_s=delay_s, chance=random.Random(0))
    served = list(Simulation(spec, OpenLoop(arrivals), placement).run())
    assert len(served) == len(arrivals)
    end = max(one.finished for one in served) + 60.0
    for _ in range(50 * gateways):  # each gateway gets some of these, and learns by them what the others did
        _, handle = placement.place(request_of("end"), end)
        placement.finished(handle, Outcome(ok=True), end)
    for router in routers:
        router.check()
        assert router.ledger.open_leases == 0


def test_what_all_have_applied_is_dropped_from_the_log() -> None:
    placement, routers = two_gateways(1.0)
    for number in range(20_000):
        _, handle = placement.place(request_of("ab"), float(number))
        placement.finished(handle, Outcome(ok=True), number + 0.5)
    assert placement.logged < 10_000
    assert all(router.ledger.open_leases < 10 for router in routers)
