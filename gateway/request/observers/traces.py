"""Spans of traced requests (`tracing.endpoint`)."""

from __future__ import annotations

from gateway.request.record import SettledRequest
from gateway.request.tracing.spans import spans_of
from gateway.telemetry.tracing.exporter import Exporter


class Traces:
    """Hands the spans of a traced request to the exporter's thread."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def __call__(self, request: SettledRequest) -> None:
        if request.trace is not None:
            self._exporter.put(spans_of(request, request.trace))
