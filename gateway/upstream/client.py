"""Towards the replicas: one attempt is opened, its first bytes are awaited, the rest is passed on as it comes.

An attempt counts as begun only when the first byte of the body is here: until then nothing has gone to the client, so every
way to fail before it is a `ReplicaFailure` and another replica may be tried. Closing an attempt that is not finished closes
its connection, which is how every engine learns that nobody waits for its answer any more.

The request goes out in one write, or a large body in slices, and such a body is not copied for it. Of its headers only those
are dropped that concern one connection or that we make anew (RFC 9110, section 7.6.1); the others go on as the bytes that they
were.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from gateway.config.live import Live
from gateway.errors import ReplicaFailure
from gateway.upstream.connection import Connection, Sink
from gateway.upstream.dialer import Dialer
from gateway.upstream.headers import Address, parse_address
from gateway.upstream.http1 import Head
from gateway.upstream.loop_guard import LoopGuard
from gateway.upstream.pool import ConnectionPool, Dials
from gateway.upstream.resolver import Resolver
from gateway.upstream.timeouts import Limits, limits_of

_REQUEST_TIMEOUT: Final = 408

_WITH_BODY: Final = frozenset(["POST", "PUT", "PATCH"])


class Call:
    """One request as it goes upstream. path: with its query, ASCII; headers: their lines, as `upstream_headers` makes them.

    repeatable: to send it twice does no harm (generations; not a file upload). Only then may it be tried again after it may
    have reached a replica. probe: the gateway's own question, no request. via: the gateways that it passed (`loop_guard.py`).
    """

    __slots__ = ("body", "headers", "method", "path", "probe", "repeatable", "via")

    def __init__(
        self,
        method: str,
        path: str,
        headers: bytes,
        body: bytes,
        *,
        repeatable: bool = True,
        probe: bool = False,
        via: str | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.repeatable = repeatable
        self.probe = probe
        self.via = via

    def with_body(self, body: bytes) -> Call:
        """The same call with another body."""
        return Call(self.method, self.path, self.headers, body, repeatable=self.repeatable, probe=self.probe, via=self.via)

    def __repr__(self) -> str:
        return f"<Call {self.method} {self.path}, {len(self.body)} bytes>"


class ReplicaAnswer:
    """A replica's answer that has begun. `close` it exactly once, in a `finally`; more is harmless.

    address: of the replica. sends: how often the request was sent for it.
    """

    __slots__ = ("_connection", "_pool", "address", "content_type", "head", "sends")

    def __init__(self, connection: Connection, upstream: Upstream, head: Head) -> None:
        self._connection: Connection | None = connection
        self._pool = upstream.pool
        self.address = upstream.address
        self.sends = 1
        self.head = head
        self.content_type = head.fields.content_type

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def _open(self) -> Connection:
        assert self._connection is not None
        return self._connection

    @property
    def complete(self) -> bool:
        """Whether the whole answer is here."""
        return self._open.complete

    def peek(self, start: int = 0) -> bytes:
        """What of the body is here, from this byte on; it is not taken. O(its length)."""
        return self._open.peek(start)

    def still_prefill(self) -> None:
        """What is here is not the answer yet: the time for its first byte goes on."""
        self._open.still_prefill()

    async def more(self) -> None:
        """Until more is here than `peek` gives, or the answer is complete. Raises ReplicaFailure if it ends too early."""
        await self._open.wait(self._open.unread)

    def take(self) -> bytes:
        """What of the body is here and was not taken yet."""
        return self._open.take()

    def take_turn(self) -> bytes:
        """Likewise, but not more than should be read in one turn of the event loop; `pump` gives the rest."""
        return self._open.take_turn()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises ReplicaFailure if it ends too early or is longer than `limit` bytes."""
        body = b"" if (self.head.length or 0) > limit else await self.read_begin(limit)
        if len(body) > limit or not self.exhausted:
            raise ReplicaFailure("garbage", f"the answer is longer than {limit} bytes")
        return body

    @property
    def exhausted(self) -> bool:
        """Whether the whole body has come and was taken."""
        return self._open.complete and not self._open.unread

    async def read_begin(self, limit: int, charge: Callable[[int], None] | None = None) -> bytes:
        """The whole body if it has at most `limit` bytes; else its beginning: more than `limit` bytes, by one read at most.

        charge: called with the size of each piece that is kept until the rest is here; what it raises ends the reading.
        Raises ReplicaFailure if the body ends too early.
        """
        connection = self._open
        body = connection.take()
        if connection.complete or len(body) > limit:
            return body
        pieces = BytesIO()  # it grows in place: the pieces and the whole are never held at once
        while True:
            if charge:
                charge(len(body))
            pieces.write(body)
            if pieces.tell() > limit or self.exhausted:
                del body
                return pieces.getvalue()
            await connection.wait()
            body = connection.take()

    async def pump(self, sink: Sink) -> None:
        """Give the rest of the body to `sink` as it comes. Raises ReplicaFailure if it ends too early, or ClientStalled."""
        await self._open.pump(sink)

    def when_sent(self, call: Callable[[], None]) -> None:
        """Call it when the request's body is not in memory for this attempt any more. Not called if that ends before."""
        self._open.when_sent(call)

    def pause(self) -> None:
        """Read no more of this answer: the client does not keep up."""
        if self._connection:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection:
            self._connection.resume()

    def close(self) -> None:
        """Idempotent. A finished connection goes back to the pool, an unfinished one is closed."""
        connection, self._connection = self._connection, None
        if connection:
            self._pool.give_back(connection)

    def __repr__(self) -> str:
        return f"<ReplicaAnswer {self.status}, {self._connection!r}>"


@dataclass(slots=True)
class Upstream:
    """The way to one replica. host_lines: the headers that all calls to it have in common, Host and X-Warmroute-Via."""

    address: Address
    pool: ConnectionPool
    host_lines: str


class UpstreamClient:
    """The connections to all replicas, by base URL."""

    def __init__(
        self,
        live: Live,
        resolver: Resolver | None = None,
        hung_up: Callable[[str, float], None] | None = None,
        loops: LoopGuard | None = None,
        dials: Callable[[Address], Dials] | None = None,
    ) -> None:
        """resolver: for the names of replicas (default: one of its own). hung_up: called with a base URL and seconds when a
        connection that was idle for so long is closed from there. loops: marks what goes to replicas (default: a new id).
        dials: makes connections to an address (default: over the network).
        """
        self._loops = loops or LoopGuard()
        self._live = live
        self._timeouts = live.timeouts
        self._limits = limits_of(self._timeouts)
        self._hung_up = hung_up
        self._dials = dials
        self._upstreams: dict[str, Upstream] = {}
        self._guarded: set[str] = set()
        self._resolver = resolver or Resolver()
        self._tls: ssl.SSLContext | None = None  # made once: reading the trusted certificates takes tens of milliseconds

    def close(self) -> None:
        """Close all idle connections."""
        for upstream in self._upstreams.values():
            upstream.pool.close()

    def guard(self, base_url: str) -> None:
        """Never connect from there to a link-local address or a cloud's metadata service, whatever the name resolves to."""
        self._guarded.add(base_url)

    def trust(self, base_urls: Iterable[str]) -> None:
        """These may lead to any address."""
        self._guarded.difference_update(base_urls)

    def forget(self, base_url: str) -> None:
        """A replica left for good. O(replicas)."""
        self._guarded.discard(base_url)
        if upstream := self._upstreams.pop(base_url, None):
            upstream.pool.close()
            host = upstream.address.host
            if all(other.address.host != host for other in self._upstreams.values()):
                self._resolver.forget(host)

    def silence_s(self, base_url: str) -> float:
        """Seconds since the last byte of an answer to a request from there; infinite: there was none. O(requests there)."""
        upstream = self._upstreams.get(base_url)
        return asyncio.get_running_loop().time() - upstream.pool.answered_at if upstream else math.inf

    async def open(self, base_url: str, call: Call, timeout_s: float | None = None, *, fresh: bool = False) -> ReplicaAnswer:
        """Send `call` and await the first byte of the answer's body. Raises ReplicaFailure.

        A pooled connection that dies before any answer says nothing about the replica (it may just have closed an idle
        connection), so the call is repeated once, on a fresh one. Raises GatewayError 503 where the gateway itself is out of
        resources. timeout_s: for connecting, and for all the rest; without it, what the configuration says. fresh: use no
        pooled connection, so that the call is sent once at most.
        """
        upstream = self._upstreams.get(base_url) or self._add(base_url)
        limits = Limits(timeout_s, timeout_s, timeout_s, timeout_s) if timeout_s else self._limits_now()
        pool, head = upstream.pool, self._head(upstream, call)
        reused = None if fresh else pool.idle()
        if reused is None:
            return await _answer(upstream, await pool.connect(limits.connect_s), head, call, limits)
        try:
            attempt = await _answer(upstream, reused, head, call, limits)
        except ReplicaFailure as failure:
            if failure.reason != "reset" or reused.started or not call.repeatable:
                raise
        else:
            if not _is_stale(attempt):
                return attempt
            attempt.close()
            if not call.repeatable:
                raise ReplicaFailure("reset", "the replica closed an idle connection with a 408")
        try:
            attempt = await _answer(upstream, await pool.connect(limits.connect_s), head, call, limits)
        except ReplicaFailure as second:
            # The first connection did take the call: if the replica is gone now, the call may be why.
            raise ReplicaFailure(second.reason, second.message, reached=1 + second.reached) from second
        attempt.sends = 2
        return attempt

    def _limits_now(self) -> Limits:
        """By the configuration in force."""
        if self._live.timeouts is not self._timeouts:
            self._timeouts = self._live.timeouts
            self._limits = limits_of(self._timeouts)
        return self._limits

    def _add(self, base_url: str) -> Upstream:
        address = parse_address(base_url)

        def hung_up(idle_s: float) -> None:
            if self._hung_up:
                self._hung_up(base_url, idle_s)

        dialer = self._dials(address) if self._dials else self._dialer(address, base_url)
        host_lines = f"Host: {address.netloc}\r\n{self._loops.line()}"
        upstream = self._upstreams[base_url] = Upstream(address, ConnectionPool(dialer, hung_up), host_lines)
        return upstream

    def _dialer(self, address: Address, base_url: str) -> Dialer:
        if address.tls and self._tls is None:
            self._tls = ssl.create_default_context()

        def guarded() -> bool:
            return base_url in self._guarded

        return Dialer(address.host, address.port, self._tls if address.tls else None, self._resolver, guarded)

    def _head(self, upstream: Upstream, call: Call) -> bytes:
        """The request's bytes before its body."""
        address = upstream.address
        common = f"Host: {address.netloc}\r\n{self._loops.line(call.via)}" if call.via else upstream.host_lines
        length = b"Content-Length: %d\r\n" % len(call.body) if call.body or call.method in _WITH_BODY else b""
        begin = f"{call.method} {address.path}{call.path} HTTP/1.1\r\n{common}".encode("ascii")
        return b"".join((begin, call.headers, length, b"\r\n"))

    def __repr__(self) -> str:
        return f"<UpstreamClient {[upstream.pool for upstream in self._upstreams.values()]}>"


async def _answer(upstream: Upstream, connection: Connection, head: bytes, call: Call, limits: Limits) -> ReplicaAnswer:
    if not call.probe:
        upstream.pool.carries_request(connection)
    try:
        connection.send(head, call.body, to_head=call.method == "HEAD", limits=limits)
        await connection.wait()
    except BaseException:
        upstream.pool.give_back(connection)
        raise
    assert connection.answer is not None
    assert connection.answer.head is not None
    return ReplicaAnswer(connection, upstream, connection.answer.head)


def _is_stale(attempt: ReplicaAnswer) -> bool:
    """Whether the first answer on a reused connection only says that the connection was idle for too long.

    Some servers send a 408 before they close it. It may have been on its way before the request was sent.
    """
    return attempt.status == _REQUEST_TIMEOUT and not attempt.head.keep_alive
