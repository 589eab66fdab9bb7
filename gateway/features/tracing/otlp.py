"""Sends spans by OTLP over HTTP with OpenTelemetry's exporter, imported when traces are configured: the extra `otel`.

The library encodes, compresses, posts and repeats. Its tracers are not used: they cost more per span than a request does here,
and the request's record already contains the data (`features/tracing/`).

The library reads the standard's variables: OTEL_EXPORTER_OTLP_HEADERS (keys), OTEL_EXPORTER_OTLP_CERTIFICATE,
OTEL_RESOURCE_ATTRIBUTES and the like.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from gateway.features.tracing.exporter import Rejection
from gateway.features.tracing.span import CLIENT, INTERNAL, SERVER, Span

TIMEOUT_S: Final = 5.0  # for a batch, all attempts together; the library lets each read of an answer take as long
TRACES_PATH: Final = "/v1/traces"
SCOPE: Final = "warmroute"
LIBRARY: Final = "warmroute[otel]"
_MAX_SHOWN: Final = 200  # characters of the collector's own text


def is_installed() -> bool:
    """Tell whether the library is installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        return False
    return True


class FirstMessage(logging.Handler):
    """Handler that stores the first message since `text` was emptied. The library logs every attempt; the first says why."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class SpanStream:
    """Iterable of known length: each span is made when the library is about to encode it (`exporter.py` rests in between)."""

    def __init__(self, spans: Iterator[Any], count: int) -> None:
        self._spans = spans
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return self._spans

    def __len__(self) -> int:
        return self._count


class ResponseCheck:
    """Response hook of `requests` for failures that the library treats as success: redirects, and rejected spans (partial
    success).
    """

    def __init__(self) -> None:
        self.rejected = 0
        self.reason = ""

    def __call__(self, response: Any, *_: object, **__: object) -> None:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        if 300 <= response.status_code < 400:
            target = response.headers.get("Location", "")[:_MAX_SHOWN]
            response.close()
            raise ValueError(f"the collector redirects to {target!r}: set that as tracing.endpoint")
        if response.ok:
            with contextlib.suppress(DecodeError):  # the status alone says that the spans are stored
                partial = ExportTraceServiceResponse.FromString(response.content).partial_success
                self.rejected = max(0, partial.rejected_spans)
                self.reason = f"the collector has rejected spans: {partial.error_message[:_MAX_SHOWN] or 'no reason given'}"


class OtlpSender:
    """Implements `Send` (`exporter.py`). endpoint: the collector's base URL. service: service.name; version: of the gateway."""

    def __init__(self, endpoint: str, service: str, version: str) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._messages = FirstMessage()
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.addHandler(self._messages)
        logger.propagate = False
        self._check = ResponseCheck()
        session = requests.Session()
        session.hooks["response"].append(self._check)
        self._url = endpoint + TRACES_PATH
        self._exporter: Any = OTLPSpanExporter(self._url, timeout=TIMEOUT_S, compression=Compression.Gzip, session=session)
        self._success = SpanExportResult.SUCCESS
        self._converted = _converter(service, version)

    def __call__(self, spans: Iterator[Span], count: int) -> Rejection | None:
        self._messages.text = ""
        self._check.rejected = 0
        if self._exporter.export(SpanStream(map(self._converted, spans), count)) is not self._success:
            return Rejection(count, f"{self._url}: {self._messages.text}")
        if rejected := min(self._check.rejected, count):
            return Rejection(rejected, f"{self._url}: {self._check.reason}")
        return None


def _converter(service: str, version: str) -> Callable[[Span], Any]:
    """Make the function that converts one of our spans to the library's."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    instance = f"{socket.gethostname()}:{os.getpid()}"
    about = {"service.name": service, "service.version": version, "service.instance.id": instance}
    resource, scope = Resource.create(about), InstrumentationScope(SCOPE, version)
    kinds = {SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT, INTERNAL: SpanKind.INTERNAL}
    sampled, unset = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)

    def converted(span: Span) -> ReadableSpan:
        trace_id = int(span.trace_id, 16)
        parent = SpanContext(trace_id, int(span.parent_id, 16), span.remote, sampled) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=sampled),
            parent=parent,
            resource=resource,
            attributes=span.attributes,
            kind=kinds[span.kind],
            status=unset if span.error is None else Status(StatusCode.ERROR, span.error or None),
            start_time=span.begun,
            end_time=span.ended,
            instrumentation_scope=scope,
        )

    return converted
