"""Metrics of the feature `responses`, as its declaration names them."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFamily


class ResponsesMetrics:
    """Stored responses, histories of requests, and runs."""

    def __init__(self, make: MetricFamily) -> None:
        self.kept = make.counter(
            "responses_kept_total",
            "Responses that were to be kept: kept, failed (the store), unfit (too large, or none), repeated (its id is taken).",
            "result",
        )
        self.file_lost = make.counter(
            "state_file_lost_total", "Times that SQLite's file of responses was found to be deleted or replaced."
        )
        self.runs = make.counter(
            "background_runs_total",
            "Responses that ran in the background, by how they ended: completed, incomplete, failed, cancelled.",
            "status",
        )
        self.histories = make.counter(
            "histories_total",
            "Requests with previous_response_id or a conversation: found, connection (the newest response of its WebSocket),"
            " unknown, expired, too_large, failed (the store).",
            "result",
        )
