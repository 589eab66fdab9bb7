"""Metrics of the feature `discovery`, as its declaration names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gateway.telemetry.counters import merge_min
from gateway.telemetry.metrics import MetricFamily

if TYPE_CHECKING:
    from gateway.cluster.watches import Watch


class DiscoveryMetrics:
    """Sources of replicas, and the numbers of their replicas."""

    def __init__(self, make: MetricFamily) -> None:
        self.up = make.gauge(
            "discovery_up",
            "1: what a source of replicas has found is up to date; 0: it has not answered yet, or failed the last time.",
            "source",
            merge_rule=merge_min,
        )
        self.replicas = make.gauge("discovery_replicas", "Replicas that a source has brought.", "source")

    def show(self, sources: Iterable[tuple[Watch, int]]) -> None:
        """sources: watches with their numbers of replicas."""
        for gauge in (self.up, self.replicas):
            gauge.values.clear()  # removes the values of former sources
        for watch, replicas in sources:
            self.up.set((watch.name,), not watch.problem)
            self.replicas.set((watch.name,), replicas)
