"""Tracing: spans of requests, sent to a collector."""

from __future__ import annotations

import os
import random

from gateway import __version__
from gateway.core import Core
from gateway.features.tracing.exporter import Exporter
from gateway.features.tracing.metrics import TracingMetrics
from gateway.features.tracing.observer import Traces
from gateway.features.tracing.otlp import OtlpSender  # now: later, the library's import would hold requests up
from gateway.features.tracing.sampling import Tracer
from gateway.features.tracing.section import TRACING


def install(core: Core) -> None:
    service = os.environ.get("OTEL_SERVICE_NAME") or "warmroute"
    exporter = Exporter(OtlpSender(TRACING.of(core.config).endpoint, service, __version__))
    traces = Traces(Tracer(core.live, random.Random(), core.wall_clock), exporter)
    core.extensions.begun.append(traces.begin)
    core.extensions.explainers.append(traces)
    core.observers.append(traces)
    core.gauges.append(lambda: exporter.count(core.metrics.of(TracingMetrics)))

    async def start() -> None:
        exporter.start()

    core.work.begins.append(start)
    core.work.closes.append(exporter.close)
    core.put(exporter)
