"""Metrics of the feature `sharing`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class SharingMetrics:
    """The exchange over the store."""

    def __init__(self, make: MetricFamily) -> None:
        self.up = make.gauge(
            "sharing_up", "1 while this gateway exchanges what it knows with others through the store; 0: it is alone."
        )
        self.gateways = make.gauge("sharing_gateways", "Other gateways that were seen in the store in the last seconds.")
        self.errors = make.counter(
            "sharing_errors_total",
            "Failures of the store: unreachable, full, denied (password, rights), garbage (not ours under our key), other.",
            "reason",
        )
        self.refused = make.counter(
            "sharing_refused_total",
            "What was in the store and not taken in: version (of another release), format (other lengths of blocks), garbage.",
            "reason",
        )
        self.dropped = make.counter(
            "sharing_dropped_total", "Items that were not published: the store did not take them for too long."
        )
        self.resyncs = make.counter(
            "sharing_resyncs_total", "Times that something of another gateway was missed, and asked for again."
        )
