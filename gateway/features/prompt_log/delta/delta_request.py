"""A request on its way to a gateway that keeps logs, and that gateway's words about its log."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any, Final, NamedTuple

from gateway.features.prompt_log.delta.outline import BodyOutline
from gateway.features.prompt_log.delta.planning import DeltaPlan
from gateway.features.prompt_log.header import MAX_BYTES
from gateway.features.prompt_log.naming.chain import chain_named
from gateway.features.prompt_log.structured_field import dictionary
from gateway.request.client import TENANT_HEADER
from gateway.request.exchange import Exchange
from gateway.request.owner import owner
from gateway.request.slots import Slot
from gateway.upstream.client import ReplicaCall

_SCOPE_BYTES: Final = 16
_LENGTH: Final = re.compile(r"[0-9]{1,9}")
_MOST_EXPIRY: Final = 1 << 40  # Unix seconds


class DeltaRequest:
    """body: the client's, for which `outline` was made; b"" once it is not needed. outline: None: the log has no name. plan: of
    the present call; None: it goes without the header. call: as it was before the plan; None once the answer counts. scope:
    begins the keys of acknowledged heads. replica: its name. replayed: an earlier call was refused. sent: bytes of all bodies.
    """

    __slots__ = ("body", "call", "outline", "plan", "replayed", "replica", "scope", "sent")

    def __init__(self, body: bytes, outline: BodyOutline | None) -> None:
        self.body = body
        self.outline = outline
        self.plan: DeltaPlan | None = None
        self.call: ReplicaCall | None = None
        self.scope = b""
        self.replica = ""
        self.replayed = False
        self.sent = 0

    def release(self) -> None:
        """The answer counts: the body is not needed any more."""
        self.body, self.call = b"", None

    def __repr__(self) -> str:
        return f"<DeltaRequest {self.plan!r}>"


DELTA: Final = Slot[DeltaRequest]("prompt_log.delta")


class LogWords(NamedTuple):
    """The statement of a gateway about a log. input: the chain of the request's log. frame: its name. head: the chain with the
    answer. expires: Unix seconds; 0: the turn is not kept. length: number of entries; 0: the answer does not say it.
    """

    input: bytes | None
    frame: str
    head: bytes | None
    expires: float
    length: int = 0


def words_in(value: bytes) -> LogWords | None:
    """The words in the header of an answer; None: it has none."""
    members = dictionary(value.decode("latin-1")) if 0 < len(value) <= MAX_BYTES else None
    if members is None or "input" not in members:
        return None
    expires = members.get("expires", "0")
    kept = members.get("kept") == "?1" and expires.isdigit()
    frame, length = members.get("frame", "").strip('"'), members.get("length", "")
    until = _time(int(expires)) if kept else 0.0
    entries = int(length) if _LENGTH.fullmatch(length) else 0
    return LogWords(_chain(members.get("input")), frame, _chain(members.get("head")), until, entries)


def words_of(value: Any) -> LogWords | None:
    """The words in an event of a stream; None: they have another form."""
    if not isinstance(value, dict):
        return None
    expires, head = value.get("expires"), value.get("head")
    until = _time(expires) if value.get("kept") is True and isinstance(expires, int) else 0.0
    return LogWords(None, "", chain_named(head) if isinstance(head, str) else None, until)


def scope_of(exchange: Exchange, url: str) -> bytes:
    """The scope of a request's heads at the gateway with this URL: all that may decide who owns them there, and the API, as a
    frame or a base of another API is refused.
    """
    headers = exchange.request.headers
    about = [headers.get(name) or "" for name in ("Authorization", "X-Api-Key", TENANT_HEADER)]
    whole = "\0".join([owner(exchange.request, exchange.caller), *about, url, exchange.request.path])
    return sha256(whole.encode("utf-8", "surrogatepass")).digest()[:_SCOPE_BYTES]


def _chain(text: str | None) -> bytes | None:
    return chain_named(text.strip('"')) if text else None


def _time(value: int) -> float:
    return float(min(max(value, 0), _MOST_EXPIRY))
