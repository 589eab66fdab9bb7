"""Metrics of the feature `savings`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.counters import merge_sum
from gateway.telemetry.metrics import MetricFamily

_TODAY = "since midnight (UTC), or the gateway's start if that was later"


class SavingsMetrics:
    """Cached tokens under other policies."""

    def __init__(self, make: MetricFamily) -> None:
        self.compared_tokens = make.counter(
            "compared_prompt_tokens_total", "Prompt tokens of answers for which other policies were followed (routing.compare)."
        )
        self.policy_cached_tokens = make.counter(
            "policy_cached_tokens_total",
            "Of these, cached: delivered, as the engines reported; by shadows of their caches: actual (of the replica that was"
            " chosen), round_robin, least_loaded, session.",
            "policy",
        )
        self.compared_today = make.gauge(
            "compared_prompt_tokens_today", f"compared_prompt_tokens_total {_TODAY}.", merge_rule=merge_sum
        )
        self.saved_tokens_today = make.gauge(
            "routing_saved_tokens_today",
            f"Cached tokens {_TODAY}: more than another policy would have had, by shadows of both.",
            "policy",
            merge_rule=merge_sum,
        )
        self.saved_seconds_today = make.gauge(
            "routing_saved_gpu_seconds_today", "The prefill of these tokens, in seconds.", "policy", merge_rule=merge_sum
        )
        self.saved_usd_today = make.gauge(
            "routing_saved_usd_today", "What these tokens are worth by the configured prices.", "policy", merge_rule=merge_sum
        )
        self.saved_error_today = make.gauge(
            "routing_saved_error_tokens_today",
            f"Cached tokens {_TODAY}: more than the shadow of what was chosen has found. The error of the others.",
            merge_rule=merge_sum,
        )
