"""The policies that can be configured in a gateway, by name.

More policies, for the simulator only: `router/simulation/policies.py`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from router.policies.least_cost import LeastCost
from router.policies.policy import KeyPolicy, Policies
from router.policies.power_of_two import PowerOfTwo
from router.policies.round_robin import RoundRobin
from router.policies.sticky import StickySessions

POLICIES: Final[Policies] = MappingProxyType(
    {
        "cost": LeastCost,
        "round_robin": RoundRobin,
        "least_loaded": lambda: KeyPolicy(lambda candidate: candidate.inflight),
        "power_of_two": PowerOfTwo,
        "sticky": StickySessions,
    }
)
