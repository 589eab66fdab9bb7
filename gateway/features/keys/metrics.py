"""Metrics of the feature `keys`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.counters import merge_min
from gateway.telemetry.metrics import MetricFamily


class KeyMetrics:
    """Keys, and refused requests."""

    def __init__(self, make: MetricFamily) -> None:
        self.known = make.gauge("keys", "API keys that are known, revoked and expired ones included.")
        self.up = make.gauge(
            "keys_up",
            "1 while keys, and what they have spent, are exchanged with their database or file; 0: it is away, or invalid.",
            merge_rule=merge_min,
        )
        self.failures = make.counter(
            "keys_failures_total", "Times that keys, what they have spent, or keys of issuers could not be read."
        )
        self.refused = make.counter(
            "keys_refused_total",
            "Requests without a valid API key: missing, unknown, revoked, expired, ambiguous (two that differ), claims (a token"
            " that does not fit), issuer (its keys cannot be read).",
            "reason",
        )
        self.near_budget = make.counter(
            "keys_near_budget_total",
            "Times that a key has spent 80 % of its budget of a day or a month; once in each.",
            "period",
        )
        self.limited = make.counter(
            "keys_limited_total",
            "Requests over a limit of their key: rate_limit_exceeded (per minute, or a budget that is reserved),"
            " insufficient_quota (a budget that is spent).",
            "code",
        )
