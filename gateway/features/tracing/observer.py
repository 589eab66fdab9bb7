"""Spans of traced requests (`tracing.endpoint`)."""

from __future__ import annotations

from gateway.features.tracing.exporter import Exporter
from gateway.features.tracing.spans import spans_of
from gateway.request.record import SettledRequest


class Traces:
    """Hands the spans of a traced request to the exporter's thread."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def __call__(self, request: SettledRequest) -> None:
        if request.trace is not None:
            self._exporter.put(spans_of(request, request.trace))
