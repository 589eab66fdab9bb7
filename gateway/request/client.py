"""What a request's life needs of its client's side: a request to read, and a reply to write.

`gateway/server/` implements both on connections; tests implement them on bytes. Nothing in this folder knows more of a client
than this.

These are base classes, and no Protocols, because compiled code reads their attributes directly. Implementations are compiled
with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from xxhash import xxh3_64_intdigest

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import MAX_SESSION_CHARS
from gateway.dialects.usage import Usage
from gateway.request.rights import Rights
from gateway.upstream.client import PausableSource

REQUEST_ID_HEADER: Final = "X-Request-Id"
TENANT_HEADER: Final = "X-Tenant-Id"
# Headers by which clients name a conversation, the most reliable first: those of coding agents (Claude Code, Codex, its older
# form, OpenCode, Amp), then those of servers, load generators and SDKs.
SESSION_HEADERS: Final = (
    "X-Claude-Code-Session-Id",
    "Session-Id",
    "Session_id",
    "X-OpenCode-Session",
    "X-Amp-Thread-Id",
    "X-Session-Id",
    "X-Session-Affinity",
    "X-Correlation-Id",
    "X-Dynamo-Session-Id",
)
# Some clients name the conversation here, others each request: worth something only where it comes again.
WEAK_SESSION_HEADER: Final = "X-Client-Request-Id"


class Headers(Protocol):
    """A request's headers, by names in any case."""

    def get(self, name: str, /) -> str | None: ...


class Caller:
    """Who sends a request, as its headers name them.

    tenant: the tenant header, "" without one. key: a number of credentials and tenant that is the same in all workers; 0: the
    headers name none. session: the conversation, "" where no header names one. weak_session: what may be one.
    grant: what the caller may do, where a feature knows, which the tenant is from; None: not looked up, or all.
    ambiguous: credentials come twice.
    """

    __slots__ = ("ambiguous", "grant", "key", "session", "tenant", "weak_session")

    def __init__(self, tenant: str, key: int, session: str, weak_session: str = "", grant: Rights | None = None) -> None:
        self.tenant = tenant
        self.key = key
        self.session = session
        self.weak_session = weak_session
        self.grant = grant
        self.ambiguous = False

    def number(self, address: str) -> int:
        """A number for the client, the same in all workers: by its headers; by its address if they name none.

        address: of IPv6 the network.
        """
        return self.key or xxh3_64_intdigest(address.encode())

    def __repr__(self) -> str:
        return f"<Caller {self.tenant!r}, {self.key:x}>"


def caller_of(headers: Headers) -> Caller:
    """The caller that these headers name."""
    credentials, tenant = headers.get("Authorization") or headers.get("X-Api-Key"), headers.get(TENANT_HEADER) or ""
    key = xxh3_64_intdigest(f"{credentials}\0{tenant}".encode("utf-8", "surrogatepass")) if credentials or tenant else 0
    session = ""
    for name in SESSION_HEADERS:
        if session := headers.get(name) or "":
            break
    weak = "" if session else headers.get(WEAK_SESSION_HEADER) or ""
    return Caller(tenant, key, session[:MAX_SESSION_CHARS], weak[:MAX_SESSION_CHARS])


class ClientReply:
    """One answer to one client: `begin`, `write` any number of times, `end`. Raises ConnectionError if the client has left.

    begun: the head went out. keep_alive: the connection may be used again. satisfied: the client has what it wanted: it may
    leave. usage: what was read in passing, where the bytes are not an answer but a session (a WebSocket to the replica).
    unread: some of it could not be.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.unread = False
        self.begun = False
        self.keep_alive = False
        self.satisfied = False

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        """The head, and the first bytes of the body with it.

        headers: further lines of it, each with its line end. length: the body's bytes, None: not known yet.
        """
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Bytes of the body."""
        raise NotImplementedError

    def end(self, last: bytes = b"") -> None:
        """The last bytes of the body; the answer is complete."""
        raise NotImplementedError

    def cut(self) -> None:
        """Break off, so that the client sees that something is missing."""
        raise NotImplementedError

    async def flushed(self) -> None:
        """Wait until the client has read the answer, before its next request is served."""

    def feed_from(self, answer: PausableSource | None) -> None:
        """What is to be paused while the client does not read: the replica's answer; None: nothing any more."""


class ClientRequest:
    """One request, as it came.

    path: decoded, without its query: what dialects and logs go by. target: path and query as they go to a replica, ASCII.
    lease: what of the memory budget the request holds; its account's `client` is the client's address (of IPv6 the network).
    upgrades: it asks for a WebSocket, which the replica may agree to: then the reply's `feed_from` is for both directions.
    recent: what its connection remembers of the requests before it, for the feature that has made it; None: nothing.
    any_form: it asks for a stream, and reads a plain answer as well. opened_by: of a message, the request that has opened its
    connection.
    """

    def __init__(self, method: str, path: str, target: str, headers: Headers, lease: MemoryLease) -> None:
        self.upgrades = False
        self.any_form = False
        self.opened_by: ClientRequest | None = None
        self.recent: object | None = None
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.lease = lease

    def caller(self) -> Caller:
        """Who sends it."""
        raise NotImplementedError

    def upstream_headers(self) -> bytes:
        """Its header lines as they go to a replica (`upstream/headers.py`)."""
        raise NotImplementedError

    @property
    def here(self) -> bool:
        """Whether the whole body has arrived: `take` gives it without waiting."""
        return False

    @property
    def complete(self) -> bool:
        """Whether all of the request was received, kept or not; else nothing can follow it on its connection."""
        raise NotImplementedError

    @property
    def cancelled(self) -> bool:
        """Whether its client has asked for its end: that it ends then is no error."""
        return False

    def take(self) -> bytes:
        """The body. The request keeps no reference to it, for its taker decides how long it is held."""
        raise NotImplementedError

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        """The body, decompressed. opaque: in a content coding that we do not know it is passed on as it came.

        Raises GatewayError: 400 (its coding is broken), 408, 413, 415, 503 (no memory for it now).
        """
        raise NotImplementedError

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        """keep_alive: whether the connection may be used again. patience_s: limit on waiting for the client to read."""
        raise NotImplementedError


class InternalRequest(ClientRequest):
    """A request of the gateway's own that never was bytes (`Lifecycle.run`): a background run, a step of a workflow.

    asked: the client's request behind it, whose headers go to the replica. id: of this request, in logs. answered: makes
    the reply that receives the answer; also another one, for the error if that cannot be completed. lease: of its own, with its
    body charged; the caller closes it. path: default: that of the client's request.
    """

    def __init__(
        self, asked: ClientRequest, id_: str, answered: Callable[[], ClientReply], lease: MemoryLease, path: str = ""
    ) -> None:
        super().__init__("POST", path or asked.path, path or asked.target, _InternalHeaders(asked.headers, id_), lease)
        self._lines = asked.upstream_headers()
        self._answered = answered

    def upstream_headers(self) -> bytes:
        return self._lines

    @property
    def complete(self) -> bool:
        return True

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        return self._answered()


class _InternalHeaders:
    """The headers of the client's request, with an id of its own."""

    def __init__(self, asked: Headers, id_: str) -> None:
        self._asked = asked
        self._id = id_

    def get(self, name: str, /) -> str | None:
        return self._id if name == REQUEST_ID_HEADER else self._asked.get(name)


class Audience(Protocol):
    """Which clients may learn what (`server/access.py`)."""

    def is_operator(self, request: ClientRequest, /) -> bool:
        """Whether errors may name replicas, addresses and their error messages."""

    def sees_headers(self, request: ClientRequest, /) -> bool:
        """Whether the answer may name the replica that gave it, and how much that was believed to have cached."""
