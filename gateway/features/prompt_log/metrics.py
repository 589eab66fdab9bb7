"""Metrics of the feature `prompt_log`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class PromptLogMetrics:
    """Requests with the header."""

    def __init__(self, make: MetricFamily) -> None:
        self.requests = make.counter(
            "prompt_log_requests_total",
            "Requests with the header Prompt-Log, by the wish: name, expect, keep, base, once.",
            "kind",
        )
        self.refused = make.counter("prompt_log_refused_total", "Requests refused because of the header Prompt-Log.", "code")
        self.once = make.counter(
            "once_total",
            "Requests with a token (`once`): run (began its generation), joined, repeated (had ended), taken_over (of a gateway"
            " that had stopped), mismatch (refused).",
            "result",
        )
        self.turns = make.counter(
            "prompt_log_turns_total",
            "Turns that were to be kept: kept, failed (the store), unfit (no name, or too large), full (the maximum of bytes).",
            "result",
        )
        self.delta_requests = make.counter(
            "delta_requests_total",
            "Requests to pools with delta: delta (a part was left out), whole (nothing was known), replayed (refused, then sent"
            " whole), off (without the header).",
            "result",
        )
        self.delta_bytes = make.counter(
            "delta_bytes_total", "Bytes of bodies to pools with delta: sent, and saved by names in their place.", "kind"
        )
