"""Metrics of the feature `snapshots`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.counters import merge_max
from gateway.telemetry.metrics import MetricFamily


class SnapshotMetrics:
    """Snapshots in files."""

    def __init__(self, make: MetricFamily) -> None:
        self.written = make.counter("snapshots_total", "Snapshots to be written, by result: good, failed.", "result")
        self.bytes = make.gauge("snapshot_bytes", "Size of the last snapshot.")
        self.timestamp = make.gauge(
            "snapshot_timestamp_seconds", "Unix time at which the snapshot was made that the next start would read."
        )
        self.restored_blocks = make.counter(
            "snapshot_restored_blocks_total",
            "Blocks of the prefix index that were taken in from snapshots, counted once per replica.",
            merge_rule=merge_max,
        )
