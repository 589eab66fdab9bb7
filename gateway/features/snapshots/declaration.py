"""Warm starts: snapshots of the prefix index."""

from __future__ import annotations

from typing import Final

from gateway.features.declaring import Feature
from gateway.features.snapshots.metrics import SnapshotMetrics
from gateway.features.snapshots.section import SNAPSHOT

FEATURE: Final = Feature(section=SNAPSHOT, metrics=SnapshotMetrics)
