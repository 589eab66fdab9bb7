"""Sources of replicas other than the configuration: DNS, Kubernetes, a file."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.discovery.metrics import DiscoveryMetrics
from gateway.features.discovery.table import sources_of


def install(core: Core) -> None:
    core.members = core.around.members or sources_of
    metrics = core.metrics.of(DiscoveryMetrics)
    core.gauges.append(lambda: metrics.show(core.local.membership.state_of_sources()))
