"""What one request carries along on its way through the gateway."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class Exchange:
    """A request: its parsed form, where it may go, its booking, the answer to its client, the record of what happened."""

    request: Request
    api: openai.ApiRequest
    target: Target
    booking: Booking
    record: Record
    reply: Reply | None = None
    body: bytes = b""  # of a plain answer, read whole
    complete: bool = False  # the answer was good and went out whole
    resumptions: int = 0  # attempts to go on with a broken stream that may have reached a replica
