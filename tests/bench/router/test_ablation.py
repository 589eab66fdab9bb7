"""The routers of the ablation: each leaves something out."""

from __future__ import annotations

import random

from bench.router.ablation import FULL, ROUTERS, ablated
from router.simulation.fleet import FleetSpec, RouterPlacement, Simulation
from router.simulation.generators import Agents


def waits(row: str) -> list[float]:
    spec = FleetSpec(2, kv_tokens=150_000)
    simulation = Simulation(spec, Agents(hours=0.05).source(2, random.Random(0)), RouterPlacement(ablated(row, 0), spec))
    return [one.first_token - one.arrived for one in simulation.run()]


def test_what_is_left_out_of_the_router_makes_a_difference() -> None:
    found = {row: waits(row) for row in (FULL, *ROUTERS)}
    assert len({tuple(each) for each in found.values()}) == len(found)
