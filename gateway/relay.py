"""Towards the replicas: one attempt is opened, its first bytes are awaited, its chunks are passed on.

An attempt counts as begun only when the first byte of the body is here: until then nothing has gone to the client, so every
way to fail before it is a `ReplicaFailure` and another replica may be tried. Closing an attempt that is not finished closes
its connection, which is how every engine learns that nobody waits for its answer any more.
"""

from __future__ import annotations

import errno
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gateway.config import TimeoutConfig
from gateway.errors import REFUSED, UNREACHABLE, GatewayError, ReplicaFailure, out_of_resources

# RFC 9110 section 7.6.1: what concerns one connection only; a `Connection` header may name more.
_HOP_BY_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"]
) | {"transfer-encoding", "upgrade"}
# Made anew for the replica. Answers must come uncompressed: the usage in them is read.
_REQUEST_OWN = _HOP_BY_HOP | {"host", "content-length", "content-encoding", "accept-encoding", "expect"}
_ANSWER_OWN = _HOP_BY_HOP | {"date", "server"}

# vLLM and other uvicorn servers close idle connections after 5 s; a pooled one must be gone before that.
KEEPALIVE_S = 4.0

_LARGE_BODY = 1 << 19

# What keeps us from connecting is our own lack of file descriptors, ports or memory.
_OUR_OWN = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it goes upstream. path: with its query, as the client sent it.

    repeatable: to send it twice does no harm (generations; not a file upload). Only then may it be tried again after it may
    have reached a replica.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes
    repeatable: bool = True


@dataclass(slots=True)
class Attempt:
    """A replica's answer that has begun. first: the first bytes of its body (b"" if it has none)."""

    status: int
    headers: CIMultiDict[str]
    first: bytes
    _response: aiohttp.ClientResponse = field(repr=False)

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, the first bytes included. Raises ReplicaFailure if it ends too early."""
        chunk = self.first
        while chunk:
            yield chunk
            chunk = await _next_chunk(self._response)

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises ReplicaFailure if it ends too early or is longer than `limit` bytes."""
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise ReplicaFailure("garbage", f"the answer is longer than {limit} bytes")
            parts.append(chunk)
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent. A finished connection goes back to the pool, an unfinished one is closed."""
        self._response.close()


class Relay:
    """The pooled connections to all replicas. Use as an async context manager."""

    def __init__(self, timeouts: TimeoutConfig) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, sock_read=timeouts.idle_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Relay:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
            timeout=self._timeout,
            trace_configs=[trace],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def open(self, base_url: str, call: Call, timeout_s: float | None = None) -> Attempt:
        """Send `call` and await the first byte of the answer's body. Raises ReplicaFailure.

        A pooled connection that dies before any answer says nothing about the replica (it may just have closed an idle
        connection), so the call is repeated once. Raises GatewayError 503 where the gateway itself is out of resources.
        """
        note = SimpleNamespace(reused=False)
        try:
            return await self._open(base_url, call, timeout_s, note)
        except ReplicaFailure as failure:
            if failure.reason != "reset" or not note.reused or not call.repeatable:
                raise
        try:
            return await self._open(base_url, call, timeout_s, note)
        except ReplicaFailure as failure:
            # The first connection did take the call: if the replica is gone now, the call may be why.
            raise ReplicaFailure(failure.reason, failure.message, reached=True) from failure

    async def _open(self, base_url: str, call: Call, timeout_s: float | None, note: SimpleNamespace) -> Attempt:
        assert self._session is not None
        try:
            response = await self._session.request(
                call.method,
                URL(base_url + call.path, encoded=True),
                headers=call.headers,
                data=_payload(call.body),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s) if timeout_s else self._timeout,
                trace_request_ctx=note,
            )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _failure(error) from error
        if response.status == 101:
            response.close()
            raise ReplicaFailure("garbage", "the answer switches protocols")
        try:
            first = await _next_chunk(response)
        except BaseException:
            response.close()
            raise
        return Attempt(response.status, answer_headers(response.headers), first, response)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """A large body is written in pieces, so that it does not hold up the event loop."""
    return io.BytesIO(body) if len(body) > _LARGE_BODY else body or None


async def _note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _next_chunk(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _failure(error) from error


def _failure(error: Exception) -> ReplicaFailure | GatewayError:
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError):
        if error.errno in _OUR_OWN:
            return out_of_resources(error.strerror or text)
        return ReplicaFailure(REFUSED if error.errno == errno.ECONNREFUSED else UNREACHABLE, text)
    if isinstance(error, aiohttp.ConnectionTimeoutError | UnicodeError):
        return ReplicaFailure(UNREACHABLE, text)
    if isinstance(error, TimeoutError):
        return ReplicaFailure("timeout", text)
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.InvalidURL):
        return ReplicaFailure("garbage", "the answer is not HTTP")
    return ReplicaFailure("reset", text)


def request_headers(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    """A client's headers as they go to a replica."""
    kept = _without(headers, _REQUEST_OWN | _named_by_connection(headers))
    kept["Accept-Encoding"] = "identity"
    kept["X-Request-Id"] = request_id
    return kept


def answer_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A replica's headers as they go to the client."""
    return _without(headers, _ANSWER_OWN | _named_by_connection(headers))


def _without(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names)


def _named_by_connection(headers: CIMultiDictProxy[str]) -> frozenset[str]:
    return frozenset(name.strip().lower() for line in headers.getall("Connection", []) for name in line.split(","))
