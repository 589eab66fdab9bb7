"""The audit of replicas' claims."""

from __future__ import annotations

from typing import Final

from gateway.features.audit.metrics import AuditMetrics
from gateway.features.declaring import Feature

FEATURE: Final = Feature(metrics=AuditMetrics)
