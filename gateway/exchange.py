"""What one request carries along on its way through the gateway."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from gateway.api import openai
from gateway.body import lease_of
from gateway.budget import LARGE_BODY
from gateway.errors import over_budget
from gateway.plain import PlainRequest
from gateway.record import Record
from gateway.replicas import Target
from gateway.reply import Reply
from router import Booking

Request = web.Request | PlainRequest


class Headers(Protocol):
    """What is asked of a request's headers, whoever has read them."""

    def get(self, name: str, /) -> str | None: ...


class Exchange:
    """A request: its parsed form, where it may go, its booking, the answer to its client, the record of what happened.

    body: of a plain answer, read whole. complete: the answer was good and went out whole. resumptions: attempts to go on with
    a broken stream that may have reached a replica.
    """

    __slots__ = ("api", "body", "booking", "complete", "record", "reply", "request", "resumptions", "target")

    def __init__(self, request: Request, api: openai.ApiRequest, target: Target, booking: Booking, record: Record) -> None:
        self.request = request
        self.api = api
        self.target = target
        self.booking = booking
        self.record = record
        self.reply: Reply | None = None
        self.body = b""
        self.complete = False
        self.resumptions = 0

    def drop_body(self) -> None:
        """The request will not be sent again: nobody needs its body any more."""
        self.api.body = b""
        lease_of(self.request).drop_body()

    def require_room(self) -> None:
        """Raises GatewayError if a large plain answer could not be held until the client has read it.

        It is charged as far as the client does not keep up (`client.py`).
        """
        lease, size = lease_of(self.request), len(self.body)
        if size >= LARGE_BODY and not lease.fits(size):
            self.body = b""
            raise over_budget(0, lease.account.largest)

    def __repr__(self) -> str:
        return f"<Exchange {self.record.id}, {self.booking!r}, {self.reply!r}>"


def keep_prompt(request: Request, api: openai.ApiRequest) -> None:
    """Charge the canonical prompt of a large body, until `drop_prompt`. Raises GatewayError if there is no room."""
    lease = lease_of(request)
    if api.prompt and not lease.grow(size := _prompt_bytes(api)):
        raise over_budget(lease.held + size, lease.account.largest)


def drop_prompt(request: Request, api: openai.ApiRequest) -> None:
    """Its block keys are made: nobody needs the canonical prompt any more."""
    if api.prompt:
        if len(api.body) >= LARGE_BODY:
            lease_of(request).shrink(_prompt_bytes(api))
        api.prompt = b""  # not None: it had one


def _prompt_bytes(api: openai.ApiRequest) -> int:
    if api.prompt is None:
        return 0
    return len(api.prompt) if isinstance(api.prompt, bytes) else 8 * len(api.prompt)
