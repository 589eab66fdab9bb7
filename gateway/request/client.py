"""The client's side of a request's life: a request to read, and a reply to write.

`gateway/server/` implements both on connections; tests implement them on bytes. This folder knows nothing else of a client.

These are base classes and not Protocols, because compiled code reads their attributes directly. Implementations are compiled
with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from xxhash import xxh3_64_intdigest

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import MAX_SESSION_CHARS
from gateway.dialects.usage import Usage
from gateway.request.rights import Rights
from gateway.upstream.client import PausableSource

REQUEST_ID_HEADER: Final = "X-Request-Id"
TENANT_HEADER: Final = "X-Tenant-Id"
USER_AGENT: Final = "User-Agent"
# Headers that name a conversation, the most reliable first: headers of coding agents (Claude Code, Codex, its older form,
# OpenCode, Amp), then of servers, load generators and SDKs.
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
# Session header -> the headers that name the agent within the session, and its parent; "": there is none.
# The parent is an agent of the same session if the agent has a name of its own there, else another session.
AGENT_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    "X-Claude-Code-Session-Id": ("X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id"),
    "Session-Id": ("Thread-Id", "X-Codex-Parent-Thread-Id"),
    "Session_id": ("Thread_id", "X-Codex-Parent-Thread-Id"),
    "X-OpenCode-Session": ("", "X-Parent-Session-Id"),
    "X-Session-Id": ("", "X-Parent-Session-Id"),
    "X-Session-Affinity": ("", "X-Parent-Session-Id"),
    "X-Dynamo-Session-Id": ("", "X-Dynamo-Parent-Session-Id"),
}
# Some clients name the conversation in it, others each request: only a value that repeats is useful.
WEAK_SESSION_HEADER: Final = "X-Client-Request-Id"


class Headers(Protocol):
    """A request's headers; names in any case."""

    def get(self, name: str, /) -> str | None: ...


class Caller:
    """The sender of a request, as its headers name it.

    tenant: the tenant header, or "". key: a number for credentials and tenant, the same in all workers; 0: the headers name
    neither. session: the conversation, "" if no header names one. agent: one of several in the session, "" for its main one.
    parent: the agent that has started this one, or without `agent` the session; "": none, unknown, or the session's main
    agent. weak_session: possibly a conversation. grant: the caller's rights, from a feature, which also sets the tenant; None:
    not looked up, or all rights. ambiguous: credentials occur twice.
    """

    __slots__ = ("agent", "ambiguous", "grant", "key", "parent", "session", "tenant", "weak_session")

    def __init__(self, tenant: str, key: int, session: str, weak_session: str = "", grant: Rights | None = None) -> None:
        self.tenant = tenant
        self.key = key
        self.session = session
        self.weak_session = weak_session
        self.grant = grant
        self.agent = self.parent = ""
        self.ambiguous = False

    def holding(self, tenant: str, key: int, grant: Rights | None) -> Caller:
        """The same session and agent, for the holder of other rights."""
        caller = Caller(tenant, key, self.session, self.weak_session, grant)
        caller.agent, caller.parent = self.agent, self.parent
        return caller

    def number(self, address: str) -> int:
        """A number for the client, the same in all workers: from its headers, else from its address.

        address: for IPv6 the network.
        """
        return self.key or xxh3_64_intdigest(address.encode())

    def origin(self, address: str, number: int) -> int:
        """A number for the sender by properties that it cannot make up, for evidence about replicas: the tenant of its key, or
        without keys its address. number: the client's.
        """
        if self.grant is not None:
            return xxh3_64_intdigest(b"tenant " + self.tenant.encode("utf-8", "surrogatepass"))
        return xxh3_64_intdigest(address.encode()) if self.key else number

    def __repr__(self) -> str:
        return f"<Caller {self.tenant!r}, {self.key:x}>"


def caller_of(headers: Headers) -> Caller:
    """The caller that these headers name."""
    credentials, tenant = headers.get("Authorization") or headers.get("X-Api-Key"), headers.get(TENANT_HEADER) or ""
    key = xxh3_64_intdigest(f"{credentials}\0{tenant}".encode("utf-8", "surrogatepass")) if credentials or tenant else 0
    for name in SESSION_HEADERS:
        if session := headers.get(name):
            caller = Caller(tenant, key, session[:MAX_SESSION_CHARS])
            if name in AGENT_HEADERS:
                _name_agent(caller, headers, *AGENT_HEADERS[name])
            return caller
    return Caller(tenant, key, "", (headers.get(WEAK_SESSION_HEADER) or "")[:MAX_SESSION_CHARS])


def _name_agent(caller: Caller, headers: Headers, agent_header: str, parent_header: str) -> None:
    agent = (headers.get(agent_header) or "")[:MAX_SESSION_CHARS] if agent_header else ""
    parent = (headers.get(parent_header) or "")[:MAX_SESSION_CHARS]
    caller.agent = agent if agent != caller.session else ""  # Codex: the first thread has the session's name
    caller.parent = parent if parent not in (caller.session, agent) else ""


class ClientReply:
    """One answer to one client: `begin`, `write` any number of times, `end`. Raises ConnectionError if the client has
    disconnected.

    begun: the head is sent. keep_alive: the connection may be reused. satisfied: the client has the complete result and may
    disconnect. usage: token usage read from a session (a WebSocket to the replica), whose bytes are no answer. unread: a part
    of that usage could not be read.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.unread = False
        self.begun = False
        self.keep_alive = False
        self.satisfied = False

    @property
    def gone(self) -> bool:
        """True if the client has disconnected."""
        return False

    @property
    def flows(self) -> bool:
        """True if no written bytes wait in the gateway for the client to read."""
        return True

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        """Send the head, and the first bytes of the body with it.

        headers: further lines, each with its line end. length: bytes of the body; None: unknown.
        """
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Send bytes of the body."""
        raise NotImplementedError

    def end(self, last: bytes = b"") -> None:
        """Send the last bytes of the body, which complete the answer."""
        raise NotImplementedError

    def cut(self) -> None:
        """Break the answer off, so that the client notices the missing rest."""
        raise NotImplementedError

    async def flushed(self) -> None:
        """Wait until the client has read the answer, before its next request is served."""

    def feed_from(self, answer: PausableSource | None) -> None:
        """Set the source to be paused while the client does not read: the replica's answer; None: no source."""


class AnswerKeeper:
    """Keeps the answer to a request whose client may leave before its end."""

    __slots__ = ()

    def identify(self) -> int:
        """A digest of the request's body, as it was received: to be called before that changes. O(body) the first time."""
        raise NotImplementedError

    def reply(self, inner: ClientReply, size: int | None) -> ClientReply:
        """The reply to which the answer is written. inner: to the client. size: as in `ClientRequest.reply`."""
        raise NotImplementedError

    def left(self, task: asyncio.Task[None] | None) -> bool:
        """The client has left. True: the request goes on without it. task: serves the request."""
        raise NotImplementedError

    def close(self) -> None:
        """The request has ended."""
        raise NotImplementedError


class ClientRequest:
    """One received request.

    path: decoded, without its query: for dialects and logs. target: path and query for a replica, ASCII. lease: the request's
    share of the memory budget; its account's `client` is the client's address (for IPv6 the network). upgrades: it asks for a
    WebSocket, which the replica may accept: then the reply's `feed_from` is for both directions. recent: a feature's memory of
    earlier requests on this connection, or None. any_form: it asks for a stream, and accepts a plain answer as well. opened_by:
    for a message, the request that opened its connection. pulses: it may get signs of life before its answer. keeper: of a
    feature, or None; only requests on a connection of their own use it.
    """

    pulses = False

    def __init__(self, method: str, path: str, target: str, headers: Headers, lease: MemoryLease) -> None:
        self.upgrades = False
        self.any_form = False
        self.opened_by: ClientRequest | None = None
        self.recent: object | None = None
        self.keeper: AnswerKeeper | None = None
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.lease = lease

    @property
    def local(self) -> bool:
        """True if its client is known to be on this machine."""
        return False

    @property
    def attended(self) -> bool:
        """True while a connection of its client waits for its answer."""
        return True

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that serves it, if it is known without a look at the event loop."""
        return None

    def caller(self) -> Caller:
        """The sender of the request."""
        raise NotImplementedError

    def identify(self) -> None:
        """See `AnswerKeeper.identify`."""
        if self.keeper is not None:
            self.keeper.identify()

    def derived(self, read: Callable[[Headers], Any]) -> Any:
        """The value that a pure function reads in the headers; remembered with them, if many requests have the same."""
        return read(self.headers)

    def upstream_headers(self) -> bytes:
        """The header lines for a replica (`upstream/headers.py`)."""
        raise NotImplementedError

    @property
    def here(self) -> bool:
        """True if the whole body has arrived: `take` returns it at once."""
        return False

    @property
    def complete(self) -> bool:
        """True if the whole request was received, stored or not; else no request can follow on its connection."""
        raise NotImplementedError

    @property
    def cancelled(self) -> bool:
        """True if its client has asked to cancel it: then its end is no error."""
        return False

    def take(self) -> bytes:
        """The body. The request keeps no reference to it, so that the caller decides how long it is held."""
        raise NotImplementedError

    async def read(self, *, max_bytes: int, within_s: float, opaque: bool) -> bytes:
        """The body, decompressed. opaque: a body in an unknown content coding passes unchanged.

        Raises GatewayError: 400 (its coding is broken), 408, 413, 415, 503 (no memory for it now).
        """
        raise NotImplementedError

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> ClientReply:
        """keep_alive: the connection may be reused. patience_s: time limit for the client to read. size: bytes of the answer if
        `begin` follows at once, with all of it; else None.
        """
        raise NotImplementedError


class InternalRequest(ClientRequest):
    """A request made by the gateway itself, without bytes (`Lifecycle.run`): a background run, a step of a workflow.

    asked: the client's request behind it, whose headers are sent to the replica. id: of this request, in logs. answered: makes
    the reply that receives the answer; and another one for the error if the answer cannot be completed. lease: its own, with
    its body charged; the caller closes it. path: default: the path of the client's request. fields: further fields of its line
    in the log; None: there are none. made_for: the notes of the client's request, if it has some (`notes.py`).
    """

    def __init__(
        self, asked: ClientRequest, id_: str, answered: Callable[[], ClientReply], lease: MemoryLease, path: str = ""
    ) -> None:
        super().__init__("POST", path or asked.path, path or asked.target, _InternalHeaders(asked.headers, id_), lease)
        self.fields: dict[str, str] | None = None
        self.made_for: object | None = None
        self._lines = asked.upstream_headers()
        self._answered = answered

    def upstream_headers(self) -> bytes:
        return self._lines

    @property
    def complete(self) -> bool:
        return True

    @property
    def attended(self) -> bool:
        return False

    def reply(self, *, keep_alive: bool, patience_s: float, size: int | None = None) -> ClientReply:
        return self._answered()


class _InternalHeaders:
    """The headers of the client's request, with another id."""

    def __init__(self, asked: Headers, id_: str) -> None:
        self._asked = asked
        self._id = id_

    def get(self, name: str, /) -> str | None:
        return self._id if name == REQUEST_ID_HEADER else self._asked.get(name)


class Audience(Protocol):
    """Permissions of clients to see internal information (`server/access.py`)."""

    def is_operator(self, request: ClientRequest, /) -> bool:
        """True if errors for this client may name replicas, addresses and their error messages."""

    def sees_headers(self, request: ClientRequest, /) -> bool:
        """True if the answer may name its replica, and the predicted cached tokens."""
