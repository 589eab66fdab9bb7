"""All policies for the simulator: the gateways' policies, naive ones, and the rules of other routers.

The naive ones are for comparison only, not for gateways: `longest_prefix` sends all requests to one replica when prompts share
a head, `random` reuses prefixes only by chance.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from router.policies.policy import KeyPolicy, Policies
from router.policies.table import POLICIES
from router.simulation.peers import PEERS

NAIVE: Final[Policies] = MappingProxyType(
    {
        "longest_prefix": lambda: KeyPolicy(lambda candidate: -candidate.matched_blocks),
        "random": lambda: KeyPolicy(lambda candidate: 0.0),
    }
)
SIMULATED: Final[Policies] = MappingProxyType({**POLICIES, **NAIVE, **PEERS})
