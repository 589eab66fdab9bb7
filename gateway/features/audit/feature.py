"""The audit: compares what replicas report with bounds that the gateway knows."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.audit.auditor import Auditor
from gateway.features.audit.metrics import AuditMetrics


def install(core: Core) -> None:
    auditor = Auditor(core.fleet, core.router, core.metrics.of(AuditMetrics), core.clock, core.wall_clock)
    core.put(auditor)
    core.extensions.chosen.append(auditor.chosen)
    core.extensions.delivered.append(auditor.delivered)
    core.router.followers.append(auditor.followed)
    core.work.sweeps.append(auditor.sweep)
