"""HTTP client for replicas: `open` sends a call and awaits the first byte of the body; the rest is streamed.

Until the first byte of the body nothing has gone to the client, so every failure before it is a `ReplicaFailure`, and another
replica may be tried. Closing an unfinished answer closes its connection: the engine then aborts the request.

A request is written at once, a large body in slices and without a copy. Headers: `headers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Final
from weakref import WeakValueDictionary

from gateway.config.live import Live
from gateway.errors import UNKNOWN_PATH, ReplicaFailure
from gateway.upstream.access.access import NotReady, UpstreamAccess
from gateway.upstream.access.credentials import Credentials, TlsContexts, without_client_keys
from gateway.upstream.access.fragile import FragilePool
from gateway.upstream.access.options import DEFAULT_OPTIONS, ConnectionOptions
from gateway.upstream.connection import Connection, Sink
from gateway.upstream.dialer import Dialer
from gateway.upstream.headers import Address, parse_address
from gateway.upstream.http1 import AnswerHead
from gateway.upstream.loop_guard import LoopGuard
from gateway.upstream.pool import ConnectionPool, Connector
from gateway.upstream.resolver import AddressSource, KnownAddresses, Resolver
from gateway.upstream.timeouts import UpstreamTimeouts, limits_of

DRIPS: Final = 2  # silence alone ends an answer sooner
_REQUEST_TIMEOUT: Final = 408

_UPGRADE: Final = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
_FEW_HEADERS: Final = b"Content-Type: application/json\r\n"
_WITH_BODY: Final = frozenset(["POST", "PUT", "PATCH"])


class ReplicaCall:
    """One request to a replica. path: with its query, ASCII. headers: lines, from `upstream_headers`.

    repeatable: it may be sent twice (generations; not a file upload), so it is retried even if a replica may have received it.
    probe: sent by the gateway itself. via: the gateways that it has passed (`loop_guard.py`). upgrades: to a WebSocket.
    adapted: the gateway itself has written its body, for an engine that crashes at bodies of other forms. request: the
    client's, for `UpstreamClient.running`; None: it is the gateway's own.
    """

    __slots__ = ("adapted", "body", "headers", "method", "path", "probe", "repeatable", "request", "upgrades", "via")

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
        self.upgrades = False
        self.adapted = False
        self.request: object | None = None
        self.via = via

    def with_body(self, body: bytes) -> ReplicaCall:
        """The same call with another body."""
        return self._changed(self.headers, body)

    def with_headers(self, headers: bytes) -> ReplicaCall:
        """The same call with other header lines."""
        return self._changed(headers, self.body)

    def _changed(self, headers: bytes, body: bytes) -> ReplicaCall:
        call = ReplicaCall(self.method, self.path, headers, body, repeatable=self.repeatable, probe=self.probe, via=self.via)
        call.upgrades, call.request = self.upgrades, self.request
        return call

    def __repr__(self) -> str:
        return f"<Call {self.method} {self.path}, {len(self.body)} bytes>"


class PausableSource:
    """A source of bytes for a client, which can be paused while the client does not read."""

    __slots__ = ()

    def pause(self) -> None:
        """The client does not keep up."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError


class ReplicaAnswer(PausableSource):
    """A replica's answer from its first byte on. `close` it in a `finally`; idempotent.

    address: of the replica. sends: number of times the request was sent for it.
    """

    __slots__ = ("_connection", "_pool", "address", "content_type", "head", "sends")

    def __init__(self, connection: Connection, upstream: Upstream, head: AnswerHead) -> None:
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
        """True if the whole answer has been received."""
        return self._open.complete

    def peek(self, start: int = 0) -> bytes:
        """The received, untaken bytes of the body from offset `start` on, without taking them. O(their length)."""
        return self._open.peek(start)

    def note_prefill(self, *, on: bool) -> None:
        """True: the bytes so far are no token (keep-alives, a role, progress); False: the first token is here."""
        self._open.note_prefill(on=on)

    async def more(self) -> None:
        """Wait for more bytes than `peek` returns, or the end. Raises ReplicaFailure if the answer ends too early."""
        await self._open.wait(self._open.unread)

    async def begin(self, most: int) -> bytes:
        """The first bytes of the body, up to `most`, which stay in the answer, but for a body that drips for DRIPS * idle_s:
        those received by then. Raises ReplicaFailure if it ends too early, or is silent.
        """
        if not self.complete:
            await self._open.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRIPS * self._open.idle_s):
                while not self.complete and self._open.unread < most:
                    await self.more()
        return self.peek()[:most]

    def take(self) -> bytes:
        """Take the received bytes of the body."""
        return self._open.take()

    def take_turn(self) -> bytes:
        """`take`, at most the share of one turn of the event loop; `pump` passes on the rest."""
        return self._open.take_turn()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises ReplicaFailure if it ends too early or is longer than `limit` bytes."""
        body = b"" if (self.head.length or 0) > limit else await self.read_begin(limit)
        if len(body) > limit or not self.exhausted:
            raise ReplicaFailure("garbage", f"the answer is longer than {limit} bytes")
        return body

    @property
    def exhausted(self) -> bool:
        """True if the whole body was received and taken."""
        return self._open.complete and not self._open.unread

    async def read_begin(self, limit: int, charge: Callable[[int], None] | None = None) -> bytes:
        """The whole body if it has at most `limit` bytes; else its beginning: `limit` bytes and one read more, at most.

        charge: called with the size of each buffered piece; may raise to end the reading.
        Raises ReplicaFailure if the body ends too early.
        """
        connection = self._open
        body = connection.take()
        if connection.complete or len(body) > limit:
            return body
        pieces = BytesIO()  # grows in place: never holds the pieces beside the whole
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
        """Stream the rest of the body to `sink`. Raises ReplicaFailure if it ends too early, or ClientStalled."""
        await self._open.pump(sink)

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` once this attempt no longer needs the request's body; not if the attempt ends before."""
        self._open.when_sent(callback)

    def pause(self) -> None:
        """Stop reading this answer: the client does not keep up."""
        if self._connection:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection:
            self._connection.resume()

    def forward(self, data: bytes) -> None:
        """Send bytes to the replica, which has switched protocols (101)."""
        if self._connection:
            self._connection.forward(data)

    def when_held(self, on_hold: Callable[[bool], None]) -> None:
        """Call `on_hold` with True when the replica does not read the forwarded bytes, and with False when it reads again."""
        if self._connection:
            self._connection.on_hold = on_hold

    @property
    def unsent(self) -> int:
        """Number of forwarded bytes that were not sent yet."""
        return self._connection.unsent if self._connection else 0

    def close(self) -> None:
        """Idempotent. The connection of a finished answer is returned to the pool, an unfinished one is closed."""
        connection, self._connection = self._connection, None
        if connection:
            self._pool.give_back(connection)

    def __repr__(self) -> str:
        return f"<ReplicaAnswer {self.status}, {self._connection!r}>"


@dataclass(slots=True)
class Upstream:
    """One replica. host_lines: headers common to all calls to it, Host and X-Warmroute-Via. fragile: its pool, if it is
    fragile. access: None without a key or TLS options.
    """

    address: Address
    pool: ConnectionPool
    host_lines: str
    options: ConnectionOptions
    fragile: FragilePool | None = None
    access: UpstreamAccess | None = None


class UpstreamClient:
    """Connections to all replicas, by base URL."""

    def __init__(
        self,
        live: Live,
        resolver: Resolver | None = None,
        on_idle_closed: Callable[[str, float], None] | None = None,
        loops: LoopGuard | None = None,
        dials: Callable[[Address], Connector] | None = None,
    ) -> None:
        """resolver: for host names of replicas (default: a new one). on_idle_closed: called with base URL and idle seconds when
        a replica closes an idle connection. loops: writes X-Warmroute-Via (default: with a new id). dials: makes the connector
        of an address (default: over the network).
        """
        self.strips_keys = False  # of the gateway itself, which clients send and replicas must not see
        self._loops = loops or LoopGuard()
        self._live = live
        self._timeouts = live.timeouts
        self._limits = limits_of(self._timeouts)
        self._on_idle_closed = on_idle_closed
        self._dials = dials
        self._upstreams: dict[str, Upstream] = {}
        self._hosts = Counter[str]()  # number of replicas per host
        self._guarded: set[str] = set()
        self._options: dict[str, ConnectionOptions] = {}  # options that differ from the default
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # of fragile replicas, while any pool of theirs is in use
        self._resolver = resolver or Resolver()
        self._contexts = TlsContexts()
        self._tls: ssl.SSLContext | None = None  # made once: reading the trusted certificates takes tens of milliseconds

    def close(self) -> None:
        """Close all idle connections."""
        for upstream in self._upstreams.values():
            upstream.pool.close()

    def guard(self, base_url: str) -> None:
        """Refuse link-local and metadata addresses for this base URL, also if its name resolves to one."""
        self._guarded.add(base_url)

    def trust(self, base_urls: Iterable[str]) -> None:
        """Undo `guard`: these may resolve to any address."""
        self._guarded.difference_update(base_urls)

    def set_options(self, base_url: str, options: ConnectionOptions) -> None:
        """Set the options of connections to this base URL; connections with other options carry no further call."""
        if options == DEFAULT_OPTIONS:
            self._options.pop(base_url, None)
        else:
            self._options[base_url] = options
        upstream = self._upstreams.get(base_url)
        if upstream is not None and upstream.options != options:
            del self._upstreams[base_url]
            self._hosts[upstream.address.host] -= 1
            upstream.pool.retire()

    def has_key(self, base_url: str) -> bool:
        """True if the gateway sends a key of its own there."""
        options = self._options.get(base_url)
        return options is not None and options.key is not None

    def busy(self, base_url: str) -> bool:
        """True if a fragile replica has a request of this process, or still works for a disconnected client."""
        upstream = self._upstreams.get(base_url)
        return upstream is not None and upstream.fragile is not None and upstream.fragile.busy

    def forget(self, base_url: str) -> None:
        """Drop a removed replica. O(1)."""
        self._guarded.discard(base_url)
        self._options.pop(base_url, None)
        if upstream := self._upstreams.pop(base_url, None):
            upstream.pool.close()
            host = upstream.address.host
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]
                self._resolver.forget(host)

    def silence_s(self, base_url: str) -> float:
        """Seconds since the last byte of an answer to a request; infinite: none so far. O(requests in flight there)."""
        upstream = self._upstreams.get(base_url)
        return asyncio.get_running_loop().time() - upstream.pool.answered_at if upstream else math.inf

    def running(self, base_url: str) -> Mapping[Connection, object]:
        """The requests that run at a replica (`ReplicaCall.request`), probes excluded, by their connections. Not to be changed.
        O(1).
        """
        upstream = self._upstreams.get(base_url)
        return upstream.pool.running if upstream is not None else {}

    async def open(
        self,
        base_url: str,
        call: ReplicaCall,
        timeout_s: float | None = None,
        *,
        fresh: bool = False,
        spent_s: float = 0.0,
    ) -> ReplicaAnswer:
        """Send `call` and await the first byte of the answer's body. Raises ReplicaFailure.

        A pooled connection that fails before any answer is no failure of the replica (it may just have closed an idle
        connection), so the call is repeated once, on a fresh one. Raises GatewayError 503 where the gateway itself is out of
        resources. timeout_s: replaces every configured timeout. fresh: use no pooled connection, so the call is sent once at
        most. spent_s: time of the request's earlier calls.
        """
        upstream = self._upstreams.get(base_url) or self._add(base_url)
        limits = UpstreamTimeouts(timeout_s, timeout_s, timeout_s, timeout_s) if timeout_s else self._limits_now()
        if spent_s:
            limits = limits.after(spent_s)
        if upstream.access is not None:
            await upstream.access.ready(limits.connect_s)
        if upstream.fragile is not None:
            _require_harmless(upstream.options, call)
            await upstream.fragile.turn(limits.first_byte_s)
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
        limits = limits.after(spent_s + reused.since_sent_s)
        try:
            attempt = await _answer(upstream, await pool.connect(limits.connect_s), head, call, limits)
        except ReplicaFailure as second:
            # The first connection took the call: if the replica is gone now, the call may be the cause.
            raise ReplicaFailure(second.reason, second.message, reached=1 + second.reached) from second
        attempt.sends = 2
        return attempt

    def _limits_now(self) -> UpstreamTimeouts:
        """The timeouts of the present configuration."""
        if self._live.timeouts is not self._timeouts:
            self._timeouts = self._live.timeouts
            self._limits = limits_of(self._timeouts)
        return self._limits

    def _add(self, base_url: str) -> Upstream:
        address = parse_address(base_url)

        def on_idle_closed(idle_s: float) -> None:
            if self._on_idle_closed:
                self._on_idle_closed(base_url, idle_s)

        options = self._options.get(base_url, DEFAULT_OPTIONS)
        secure = address.tls and options.tls is not None  # these options are read before the first connection
        dialer: Connector
        if self._dials is not None:
            dialer = self._dials(address)
        else:
            dialer = NotReady() if secure else self._dialer(address, base_url, options, self._default_tls(address))
        host_lines = f"Host: {address.netloc}\r\n{self._loops.line()}"
        fragile = None
        if options.fragile is not None:
            dismissal = f"GET {address.path}/v1/models HTTP/1.1\r\n{host_lines}\r\n".encode("ascii")
            turns = self._turns.setdefault(base_url, asyncio.Lock())
            fragile = FragilePool(dialer, on_idle_closed, dismissal, turns)
        pool = fragile if fragile is not None else ConnectionPool(dialer, on_idle_closed)
        upstream = self._upstreams[base_url] = Upstream(address, pool, host_lines, options, fragile)
        self._hosts[address.host] += 1
        if secure or options.key is not None:

            def renewed(read: Credentials) -> None:
                if self._dials is None:
                    pool.renew(self._dialer(address, base_url, options, read.tls or self._default_tls(address)))

            upstream.access = UpstreamAccess(options, base_url, self._contexts, secure=secure, renewed=renewed)
        return upstream

    def _default_tls(self, address: Address) -> ssl.SSLContext | None:
        """An SSL context with the system's trust. None: without TLS."""
        if not address.tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _dialer(self, address: Address, base_url: str, options: ConnectionOptions, tls: ssl.SSLContext | None) -> Dialer:
        def guarded() -> bool:
            return base_url in self._guarded

        one_by_one = options.fragile is not None
        host, port, name = address.host, address.port, options.server_name
        resolver: AddressSource = KnownAddresses(options.addresses) if options.addresses else self._resolver
        return Dialer(host, port, tls, resolver, guarded, name, one_by_one=one_by_one)

    def _head(self, upstream: Upstream, call: ReplicaCall) -> bytes:
        """The request's bytes before its body."""
        address = upstream.address
        common = f"Host: {address.netloc}\r\n{self._loops.line(call.via)}" if call.via else upstream.host_lines
        length = b"Content-Length: %d\r\n" % len(call.body) if call.body or call.method in _WITH_BODY else b""
        begin = f"{call.method} {address.path}{call.path} HTTP/1.1\r\n{common}".encode("ascii")
        headers = call.headers if upstream.fragile is None else _FEW_HEADERS  # a fragile server might crash at others
        if self.strips_keys:
            headers = without_client_keys(headers)
        if upstream.access is not None and upstream.access.credentials is not None:
            headers = upstream.access.credentials.headers(headers)
        return b"".join((begin, headers, _UPGRADE if call.upgrades else b"", length, b"\r\n"))

    def __repr__(self) -> str:
        return f"<UpstreamClient {[upstream.pool for upstream in self._upstreams.values()]}>"


def _require_harmless(options: ConnectionOptions, call: ReplicaCall) -> None:
    """Raises ReplicaFailure for a call that a fragile replica must not get."""
    if options.fragile is None or (call.method, call.path) not in options.fragile or call.upgrades:
        text = "its engine does not have this endpoint"
        raise ReplicaFailure(UNKNOWN_PATH, text, reached=0, blameless=True)
    assert call.adapted or not call.body, "a body that its engine may crash at"


async def _answer(
    upstream: Upstream, connection: Connection, head: bytes, call: ReplicaCall, limits: UpstreamTimeouts
) -> ReplicaAnswer:
    if not call.probe:
        upstream.pool.carries_request(connection, call.request)
    try:
        connection.send(head, call.body, to_head=call.method == "HEAD", limits=limits, upgrades=call.upgrades)
        await connection.wait()
    except BaseException:
        upstream.pool.give_back(connection)
        raise
    assert connection.answer is not None
    assert connection.answer.head is not None
    return ReplicaAnswer(connection, upstream, connection.answer.head)


def _is_stale(attempt: ReplicaAnswer) -> bool:
    """True if the answer is a 408 for the idle time of a reused connection.

    Some servers send one before they close it, maybe before they received the request.
    """
    return attempt.status == _REQUEST_TIMEOUT and not attempt.head.keep_alive
