"""The decision core: which replica answers a prompt soonest. Pure: no I/O; time and randomness are arguments.

These names are what a gateway needs to route a request. `router.simulation` replays workloads; `router.events`,
`router.replication_log` and `router.follower` keep several routers in step; `router.residency` takes in what engines report.
"""

from router.booking import Booking
from router.index.blocks import seed, text_keys, token_bytes, token_keys
from router.leading import MAX_S as MAX_LEAD_S
from router.leading import Lead
from router.learning.promises import HELD
from router.learning.scales import DEFAULT_UNITS_PER_TOKEN, TEMPLATE_TOKENS
from router.learning.sessions import session_key
from router.policies.table import POLICIES
from router.router import Router
from router.types import Candidate, Cost, Decision, Outcome, Prompt, Replica

__all__ = [
    "DEFAULT_UNITS_PER_TOKEN",
    "HELD",
    "MAX_LEAD_S",
    "POLICIES",
    "TEMPLATE_TOKENS",
    "Booking",
    "Candidate",
    "Cost",
    "Decision",
    "Lead",
    "Outcome",
    "Prompt",
    "Replica",
    "Router",
    "seed",
    "session_key",
    "text_keys",
    "token_bytes",
    "token_keys",
]
