"""A collector of traces on loopback: OTLP over HTTP by its specification, decoded with the standard's own messages.

It refuses invalid requests like a real collector (another path or content type, an undecodable body), and spans that nobody
could read: incomplete ids, an end before the beginning, a span as its own parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.trace.v1 import trace_pb2

PROTOBUF = "application/x-protobuf"
KINDS = {
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
}
REMOTE = trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


@dataclass(frozen=True, slots=True)
class Received:
    """A received span. error: None: its status is not an error."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    remote: bool
    begun: int
    ended: int
    attributes: Mapping[str, Any]
    error: str | None
    resource: Mapping[str, Any]


@dataclass(slots=True)
class Collector:
    """Use as an async context manager. status: of its answers; hold: awaited before each of them."""

    status: int = 200
    hold: asyncio.Event | None = None
    spans: list[Received] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)  # of each request
    bodies: list[bytes] = field(default_factory=list)  # uncompressed
    refused: list[str] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Collector:
        application = web.Application(client_max_size=64 << 20)
        application.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner
        if self.hold:
            self.hold.set()
        await self._runner.cleanup()
        assert not self.refused

    def tracing(self, **more: Any) -> dict[str, Any]:
        """The configuration of a gateway that traces every request."""
        return {"endpoint": self.url, "sample": 1, **more}

    async def asked(self, times: int) -> None:
        """Waits for this number of requests."""
        async with asyncio.timeout(40):
            while len(self.headers) < times:
                self._news.clear()
                await self._news.wait()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp undoes the compression
        self.headers.append(request.headers)
        self.bodies.append(body)
        self._news.set()
        if self.hold:
            await self.hold.wait()
        if self.status != 200:
            where = {"Location": "http://127.0.0.1:9/login"} if 300 <= self.status < 400 else {}
            return web.Response(status=self.status, text="no", headers=where)
        if request.content_type != PROTOBUF:
            self.refused.append(f"content type {request.content_type}")
            return web.Response(status=415)
        try:
            decoded = service.ExportTraceServiceRequest.FromString(body)
            spans = [
                _received(span, _values(group.resource.attributes))
                for group in decoded.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
        except (DecodeError, AssertionError, KeyError) as error:
            self.refused.append(repr(error))
            return web.Response(status=400, text="not spans")
        self.spans += spans
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString(), content_type=PROTOBUF)


def _received(span: Any, resource: Mapping[str, Any]) -> Received:
    assert len(span.trace_id) == 16, span.trace_id
    assert len(span.span_id) == 8, span.span_id
    assert len(span.parent_span_id) in (0, 8)
    assert span.span_id != span.parent_span_id
    assert any(span.trace_id)
    assert any(span.span_id)
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    assert span.name
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return Received(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        bool(span.flags & REMOTE),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.message if failed else None,
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    assert which is not None
    return [_value(each) for each in value.array_value.values] if which == "array_value" else getattr(value, which)
