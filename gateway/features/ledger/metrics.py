"""Metrics of the feature `ledger`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.counters import merge_min, merge_sum
from gateway.telemetry.metrics import MetricFamily


class LedgerMetrics:
    """Usage written to the database."""

    def __init__(self, make: MetricFamily) -> None:
        self.written = make.counter("ledger_written_total", "Requests whose usage is in the ledger.")
        self.buffered = make.gauge("ledger_buffered", "Requests whose usage is not in the ledger yet.", merge_rule=merge_sum)
        self.dropped = make.counter(
            "ledger_dropped_total",
            "Requests whose usage is not in the ledger: its buffer was full, or the database refuses it.",
        )
        self.failures = make.counter("ledger_failures_total", "Times that the ledger could not be written.")
        self.up = make.gauge(
            "ledger_up", "1 while the database takes what the ledger writes; 0: usage waits in memory.", merge_rule=merge_min
        )
