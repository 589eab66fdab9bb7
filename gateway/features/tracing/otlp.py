"""Sends spans by OTLP over HTTP with OpenTelemetry's library, which is imported when traces are configured: the extra `otel`.

Of the library only what encodes and posts is used. Its tracers are not: they cost more per span than a request does here, and
what they would note is noted in the request's record (`features/tracing/`).

Headers (keys), certificates and attributes of the resource come from the standard's variables, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES and their like, which the library reads.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, overload

from gateway.features.tracing.exporter import Untaken
from gateway.features.tracing.span import CLIENT, INTERNAL, SERVER, Span

TIMEOUT_S: Final = 5.0  # of a batch, attempts and the waits between them included
TRACES_PATH: Final = "/v1/traces"
SCOPE: Final = "warmroute"
LIBRARY: Final = "warmroute[otel]"


def is_installed() -> bool:
    """Whether the library is here."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        return False
    return True


class LastProblem(logging.Handler):
    """Keeps the last message of the library's logger in place of showing each: it logs every attempt, and what it cannot
    encode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class Lazily(Sequence[Any]):
    """Spans that are made while the library encodes them, one after the other, as `exporter.py` wants. It goes through them
    once.
    """

    def __init__(self, made: Iterator[Any], count: int) -> None:
        self._made = made
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return self._made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        raise NotImplementedError


class Otlp:
    """A `Send` (`exporter.py`). endpoint: the collector's base URL. service: service.name; version: of the gateway."""

    def __init__(self, endpoint: str, service: str, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        from gateway.features.tracing.posting import Posting

        self._problem = LastProblem()
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.addHandler(self._problem)
        logger.propagate = False
        self._posting = Posting()
        self._url = endpoint + TRACES_PATH
        self._exporter = OTLPSpanExporter(self._url, timeout=TIMEOUT_S, compression=Compression.Gzip, session=self._posting)
        self._good = SpanExportResult.SUCCESS
        self._made = _maker(service, version)

    def __call__(self, spans: Iterator[Span], count: int) -> Untaken | None:
        self._problem.text = ""
        self._posting.begin(TIMEOUT_S)
        result = self._exporter.export(Lazily(map(self._made, spans), count))
        posting = self._posting
        if result is self._good and not posting.rejected:
            return None
        why = posting.problem or self._problem.text or "the collector did not take them"
        return Untaken(min(posting.rejected, count) if result is self._good else count, f"{self._url}: {why}")


def _maker(service: str, version: str) -> Callable[[Span], Any]:
    """Makes the library's span of one of ours."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    instance = f"{socket.gethostname()}:{os.getpid()}"
    about = {"service.name": service, "service.version": version, "service.instance.id": instance}
    resource, scope = Resource.create(about), InstrumentationScope(SCOPE, version)
    kinds = {SERVER: SpanKind.SERVER, CLIENT: SpanKind.CLIENT, INTERNAL: SpanKind.INTERNAL}
    sampled, unset = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)

    def made(span: Span) -> ReadableSpan:
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

    return made
