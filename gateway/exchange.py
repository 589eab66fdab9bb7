"""What one request carries along on its way through the gateway."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final, Protocol

from aiohttp import web

from gateway.api import openai
from gateway.body import lease_of
from gateway.budget import LARGE_BODY
from gateway.errors import bad_request, over_budget
from gateway.health import Attempt as Watched
from gateway.plain import PlainRequest
from gateway.plain_answer import UsageTail
from gateway.record import Record
from gateway.relay import Attempt, Call
from gateway.replica_state import ReplicaState
from gateway.replicas import Target
from gateway.reply import Reply
from router import Booking

_OBJECT: Final = re.compile(rb"[ \t\r\n]*+\{")
# The same in UTF-8, UTF-16 or UTF-32, of either byte order, with or without byte order marks.
_ENCODED_OBJECT: Final = re.compile(rb"(?:[\0 \t\r\n]|\xef\xbb\xbf|\xff\xfe|\xfe\xff)*+\{")
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")

Request = web.Request | PlainRequest


class Headers(Protocol):
    """What is asked of a request's headers, whoever has read them."""

    def get(self, name: str, /) -> str | None: ...


class Audience(Protocol):
    """What is asked of `access.Access`: who may learn what."""

    def is_operator(self, request: Request, /) -> bool:
        """Whether errors may name replicas, addresses and what they said."""

    def sees_headers(self, request: Request, /) -> bool:
        """Whether the answer may tell which replica gave it, and how much that was believed to have cached."""


class Exchange:
    """A request: its parsed form, where it may go, its booking, the answer to its client, the record of what happened.

    copied: a copy of the body with the salt is charged.
    salt: for engines, where tenants are isolated (`routing.isolation`), else empty.
    body: of a plain answer, read whole, or the beginning of a large one. tail: only for a large one: it reads the usage as the
    answer passes. complete: the answer was good and went out whole. sent: times that the request may have reached a replica
    until its answer's first byte was here. resumptions: attempts to go on with a broken stream that may have reached one.
    watched: the attempt that the replica `chosen` answers, for its breaker; broken: those whose answer broke off.
    within_event: the head of an event went out, and not its end. last_number: of the last event, where they are numbered.
    """

    __slots__ = (
        "api",
        "body",
        "booking",
        "broken",
        "complete",
        "copied",
        "last_number",
        "record",
        "reply",
        "request",
        "resumptions",
        "salt",
        "sent",
        "tail",
        "target",
        "watched",
        "within_event",
    )

    def __init__(self, request: Request, api: openai.ApiRequest, target: Target, booking: Booking, record: Record) -> None:
        self.request = request
        self.api = api
        self.target = target
        self.booking = booking
        self.record = record
        self.reply: Reply | None = None
        self.body = b""
        self.tail: UsageTail | None = None
        self.complete = self.within_event = False
        self.last_number = -1
        self.resumptions = 0
        self.sent = 0
        self.salt = b""
        self.copied = False
        self.watched: tuple[Watched, ReplicaState] | None = None
        self.broken: list[tuple[Watched, ReplicaState]] = []

    def call_to(self, replica: ReplicaState, call: Call) -> Call:
        """The call as it goes to this replica: with the salt, if its engine knows what to do with it.

        Raises GatewayError if there is no room for the copy of a large body.
        """
        if not self.salt or not replica.facts.engine.salts:
            return call
        if len(call.body) >= LARGE_BODY and not self.copied and _members_of(call.body):
            self.charge(len(call.body))
            self.copied = True
        if (body := salted(call.body, self.salt)) is None:
            return call
        return call.with_body(body)

    def drop_body(self, attempt: Attempt) -> None:
        """The request will not be sent again: nobody needs its body any more, when this attempt has sent it."""
        self.api.body = b""
        attempt.when_sent(lease_of(self.request).drop_body)

    def charge(self, size: int) -> None:
        """Charge memory: a piece of a plain answer, a copy of the body. Raises GatewayError if there is no room for it."""
        lease = lease_of(self.request)
        if not lease.grow(size):
            raise over_budget(0, lease.account.largest)

    def require_room(self) -> None:
        """Raises GatewayError if there is no room for a large `body` until the client has read it.

        It is charged as far as the client does not keep up (`client.py`).
        """
        lease, size = lease_of(self.request), len(self.body)
        if size >= LARGE_BODY and not lease.fits(size):
            self.body = b""
            raise over_budget(0, lease.account.largest)

    def __repr__(self) -> str:
        return f"<Exchange {self.record.id}, {self.booking!r}, {self.reply!r}>"


def tenant_salt(tenant: str, salt: str) -> bytes:
    """A cache salt that no other tenant can have, whatever salt it asks for. salt: the client's own."""
    name, own = tenant.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")
    return blake2b(len(name).to_bytes(8, "little") + name + own, digest_size=16).hexdigest().encode("ascii")


def salted(body: bytes, salt: bytes) -> bytes | None:
    """A JSON object with this `cache_salt`: as its last member, which wins over one that the client has sent.

    None: it is no JSON object in UTF-8. Whether its prompt was understood does not matter: an engine may understand it.
    """
    span = _members_of(body)
    if span is None:
        return None
    first, last = span
    comma = b"," if _end_of_space(body, first) < last else b""
    return b"".join((memoryview(body)[:last], comma, b'"cache_salt":"', salt, b'"}'))


def require_saltable(body: bytes, content_type: str) -> None:
    """Raises GatewayError 400 for a body that an engine may read as JSON although `salted` cannot give it a salt.

    Engines in Python read JSON in UTF-16 and UTF-32, too, and behind a byte order mark. RFC 8259 allows neither.
    """
    if not body or _members_of(body):
        return
    if _ENCODED_OBJECT.match(body) or "json" in content_type.lower():
        text = (
            "The body must be a JSON object in UTF-8, without a byte order mark, because this gateway isolates tenants "
            "(routing.isolation)."
        )
        raise bad_request(text, code="invalid_json")


def _members_of(body: bytes) -> tuple[int, int] | None:
    """Where the members of a JSON object begin, and where its closing brace is; None for anything else. Nothing is parsed."""
    begin, last = _OBJECT.match(body), body.rfind(b"}")
    if begin is None or last < begin.end() or _end_of_space(body, last + 1) < len(body):
        return None
    return begin.end(), last


def _end_of_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    assert found is not None  # it matches nothing, too
    return found.end()
