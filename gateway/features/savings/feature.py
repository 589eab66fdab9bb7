"""Savings: compares the routing with other policies."""

from __future__ import annotations

import random

from gateway.core import Core
from gateway.features.savings.counterfactual import Counterfactual
from gateway.features.savings.metrics import SavingsMetrics
from gateway.features.savings.other_policies import OtherPolicies
from gateway.features.savings.savings import Savings
from router import Booking


def install(core: Core) -> None:
    savings = Savings(core.metrics.of(SavingsMetrics), core.wall_clock)
    others = OtherPolicies(_counterfactual(core), core.meter, savings)
    core.extensions.chosen.append(others.chosen)
    core.observers.append(others)
    core.gauges.append(savings.set_gauges)


def _counterfactual(core: Core) -> Counterfactual:
    """The simulation, which from now on also follows the decisions of other processes."""
    fleet, router, routing = core.fleet, core.router, core.config.routing

    def capacity(name: str) -> int | None:
        state = fleet.named(name)
        return (state.capacity_tokens if state else None) or router.learned_capacity(name)

    def followed(booking: Booking) -> None:
        lease, prompt = booking.lease, booking.prompt
        found.follow(prompt, fleet.siblings(lease.replica), lease.replica, lease.prompt_tokens, lease.since)

    found = Counterfactual(random.Random(), capacity, routing.ttl_s, routing.memory_mb << 19)
    router.followers.append(followed)
    return found
