"""The default: the lowest cost in seconds (`router/pricing/cost.py`)."""

from __future__ import annotations

from router.policies.policy import KeyPolicy


class LeastCost(KeyPolicy):
    """A special case in the router, which finds the cheapest candidate without pricing all, and accounts rent for copies of hot
    prefixes (`router/pricing/replication.py`).
    """

    def __init__(self) -> None:
        super().__init__(lambda candidate: candidate.cost.total_s)
