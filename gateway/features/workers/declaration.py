"""Workers: several processes that serve as one gateway."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.workers.metrics import WorkerMetrics
from gateway.features.workers.section import WORKERS

FEATURE: Final = Feature(
    wanted=lambda _config: False,  # it starts gateways, and adds nothing to one
    section=WORKERS,
    metrics=WorkerMetrics,
    serving=lambda config: "gateway.features.workers.serving:serve" if WORKERS.of(config) > 1 else "",
)
