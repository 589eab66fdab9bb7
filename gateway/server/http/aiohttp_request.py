"""Adapts a request parsed by aiohttp to the lifecycle's `ClientRequest`."""

from __future__ import annotations

from typing import Any, Final, cast

from aiohttp import HttpVersion11, web

from gateway.admission.memory import MemoryLease
from gateway.request.client import Caller, ClientReply, ClientRequest, caller_of
from gateway.server.http.body import UNKNOWN, coding_of, read_body
from gateway.server.http.response import HttpReply
from gateway.upstream.headers import upstream_headers

CREDENTIALS: Final = ("Authorization", "X-Api-Key")  # headers that must not come twice


class AiohttpRequest(ClientRequest):
    """inner: aiohttp's. lease: what the connection's current request holds of the memory budget."""

    def __init__(self, inner: web.Request, lease: MemoryLease | None = None) -> None:
        """lease: default: that of its connection, a `connection.ClientConnection`."""
        raw = inner.raw_path
        path = inner.path if "%" in raw or "?" in raw or not raw.startswith("/") else raw
        super().__init__(inner.method, path, _target(inner), inner.headers, lease_of(inner) if lease is None else lease)
        self.inner = inner

    def caller(self) -> Caller:
        caller = caller_of(self.headers)
        fields = self.inner.headers
        caller.ambiguous = any(len(fields.getall(name, ())) > 1 for name in CREDENTIALS)
        return caller

    def upstream_headers(self) -> bytes:
        return upstream_headers(self.inner.raw_headers, encoded=coding_of(self.inner.headers) == UNKNOWN)

    @property
    def complete(self) -> bool:
        return self.inner.content.is_eof() and not self.lease.refused

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        return await read_body(self.inner, self.lease, max_bytes=max_bytes, within_s=within_s, opaque=opaque)

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        inner = self.inner
        return HttpReply(
            inner.protocol,
            cast(Any, inner.transport),
            http11=inner.version >= HttpVersion11,
            to_head=inner.method == "HEAD",
            keep_alive=keep_alive and inner.keep_alive,
            patience_s=patience_s,
        )

    @property
    def local(self) -> bool:
        """Whether the client is on this machine."""
        protocol: Any = self.inner.protocol  # a connection.ClientConnection
        return protocol is not None and bool(protocol.local)


def lease_of(request: web.Request) -> MemoryLease:
    """The memory lease of the connection's current request."""
    lease = request.protocol.lease  # type: ignore[attr-defined]  # a connection.ClientConnection
    assert isinstance(lease, MemoryLease)
    return lease


def _target(request: web.Request) -> str:
    """The path with its query, unchanged if it is plain ASCII."""
    raw = request.raw_path
    return raw if raw.startswith("/") and raw.isascii() else request.rel_url.raw_path_qs
