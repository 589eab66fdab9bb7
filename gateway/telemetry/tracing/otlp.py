"""Sends spans by OTLP over HTTP with OpenTelemetry's library, which is imported when traces are configured: the extra `otel`.

Of the library only what encodes and posts is used. Its tracers are not: they cost more per span than a request does here, and
what they would note is noted in the request's record (`request/tracing/`).

Headers (keys), certificates and attributes of the resource come from the standard's variables, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES and their like, which the library reads.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, overload

from gateway.telemetry.tracing.span import CLIENT, INTERNAL, SERVER, Span

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
    """Keeps the last message of the library's logger in place of showing each: it logs every attempt. Its last one,
    after several attempts, has no reason: the warning of the attempt before has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        former = f"{self.text} " if self._warned and record.levelno >= logging.ERROR else ""
        self.text, self._warned = former + record.getMessage(), record.levelno == logging.WARNING

    def clear(self) -> None:
        self.text, self._warned = "", False


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
        import requests
        from opentelemetry.exporter.otlp.proto.http import Compression
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._problem = LastProblem()
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.addHandler(self._problem)
        logger.propagate = False
        session = requests.Session()
        session.hooks["response"].append(_refuse_redirect)
        self._url = url = endpoint + TRACES_PATH
        self._exporter = OTLPSpanExporter(url, timeout=TIMEOUT_S, compression=Compression.Gzip, session=session)
        self._good = SpanExportResult.SUCCESS
        self._made = _maker(service, version)

    def __call__(self, spans: Iterator[Span], count: int) -> str | None:
        self._problem.clear()
        result = self._exporter.export(Lazily(map(self._made, spans), count))
        if result is self._good:
            return None
        return f"{self._url}: {self._problem.text or 'the collector did not take them'}"


def _refuse_redirect(response: Any, *_: object, **__: object) -> None:
    """The library follows none, and takes one for success."""
    if response.is_redirect or response.is_permanent_redirect:
        response.close()  # else its socket stays
        where = response.headers.get("Location", "")[:200]
        raise ConnectionAbortedError(
            f"the collector redirects ({response.status_code}) to {where!r}: name that in tracing.endpoint"
        )


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
