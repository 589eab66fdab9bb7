"""Traces of requests (`tracing.endpoint`): notes while they run, spans at their end."""

from __future__ import annotations

from gateway.features.tracing.exporter import Exporter
from gateway.features.tracing.sampling import Tracer
from gateway.features.tracing.spans import spans_of
from gateway.features.tracing.trace import TRACE, Choice, Trace
from gateway.request.client import InternalRequest
from gateway.request.exchange import Exchange
from gateway.request.extensions import Explainer
from gateway.request.record import SettledRequest
from router import Candidate


class Traces(Explainer):
    """Begins a trace for the requests that the tracer chooses, and hands its spans to the exporter's thread."""

    def __init__(self, tracer: Tracer, exporter: Exporter) -> None:
        self._tracer = tracer
        self._exporter = exporter

    def begin(self, exchange: Exchange) -> None:
        record, request = exchange.record, exchange.request
        outer = request.made_for if isinstance(request, InternalRequest) else None
        if isinstance(outer, Trace):
            trace: Trace | None = self._tracer.within(outer, request, record.begun)
        else:
            trace = self._tracer.begin(request, record.begun)
        if trace is not None:
            TRACE.set(record, trace)
            exchange.notes = trace
            record.fields = {"trace_id": trace.trace_id}

    def wants(self, exchange: Exchange, now: float) -> bool:
        return exchange.notes is not None

    def explain(self, exchange: Exchange, policy: str, ranking: list[Candidate]) -> None:
        trace = TRACE.get(exchange.record)
        if trace is not None:
            trace.chose(Choice(policy, exchange.target.pool, exchange.booking.decision, ranking))

    def __call__(self, request: SettledRequest) -> None:
        trace = TRACE.get(request)
        if trace is not None:
            self._exporter.put(spans_of(request, trace))
