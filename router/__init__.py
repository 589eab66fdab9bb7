"""The decision core: which replica answers a prompt soonest. Pure: no I/O, no clock, no randomness of its own.

This is the whole public surface for those who route; `router.simulate` and `router.workloads` are for those who replay a
workload. Everything else is private to the package.
"""

from router.blocks import seed, text_keys, token_keys
from router.booking import Booking
from router.policies import POLICIES
from router.router import Router
from router.scales import DEFAULT_UNITS_PER_TOKEN
from router.types import Candidate, Cost, Decision, Outcome, Prompt, Replica

__all__ = [
    "DEFAULT_UNITS_PER_TOKEN",
    "POLICIES",
    "Booking",
    "Candidate",
    "Cost",
    "Decision",
    "Outcome",
    "Prompt",
    "Replica",
    "Router",
    "seed",
    "text_keys",
    "token_keys",
]
