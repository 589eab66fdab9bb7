"""What one request carries along on its way through the gateway."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from gateway.api import openai
from gateway.plain import PlainRequest
from gateway.record import Record
from gateway.replicas import Target
from gateway.reply import Reply
from router import Booking

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

    def __repr__(self) -> str:
        return f"<Exchange {self.record.id}, {self.booking!r}, {self.reply!r}>"
