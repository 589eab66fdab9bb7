"""Clients that speak with another gateway themselves, through this one: the header passes, and is not served here.

Each gateway keeps its own logs: a request with a base goes to the gateway whose answer had that head, and so does one to
`/v1/logs/HEAD`. The live page shows the length of the whole log.
"""

from __future__ import annotations

from typing import Final

from gateway.features.prompt_log.delta.delta_request import LogWords
from gateway.features.prompt_log.header import HEADER
from gateway.features.prompt_log.log_request import FORMS_BY_PATH
from gateway.features.prompt_log.naming.chain import EMPTY, chain_named, head_name
from gateway.features.prompt_log.structured_field import dictionary
from gateway.request.exchange import Exchange
from gateway.request.named_log import BASE, NAMED_LOG, WHOLE, NamedLog
from gateway.request.phases.objects import ReplicaObjects

_LOGS: Final = "/v1/logs/"


class PassedHeads:
    """Remembers the replicas of heads (see the module)."""

    def __init__(self, objects: ReplicaObjects) -> None:
        self._objects = objects

    def concerns(self, exchange: Exchange) -> bool:
        """True if the request has the header, for the other gateway. Messages of a WebSocket ignore it."""
        request = exchange.request
        return request.path in FORMS_BY_PATH and request.opened_by is None and request.headers.get(HEADER) is not None

    async def prepare(self, exchange: Exchange) -> None:
        """Has the gateway with the base chosen."""
        if (base := _base_of(exchange)) and not exchange.api.refers:
            exchange.api.refers = base

    def looks_up(self, exchange: Exchange) -> bool:
        """True if the path names a log."""
        return exchange.request.path.startswith(_LOGS)

    async def find(self, exchange: Exchange) -> None:
        """Has the gateway with this log chosen, if one is known to have it."""
        id_ = exchange.request.path.removeprefix(_LOGS).partition("/")[0]
        if known := self._objects.find(id_, exchange.caller):
            exchange.api.refers, exchange.api.model = id_, known[1]

    def note(self, exchange: Exchange, words: LogWords) -> None:
        """The chosen gateway has these heads."""
        for chain in (words.input, words.head):
            if chain not in (None, EMPTY):
                self._objects.note(exchange, head_name(chain))
        if words.length:
            length = words.length - (words.head is not None)  # nearly all answers are one entry
            NAMED_LOG.set(exchange.record, NamedLog(length, BASE if _base_of(exchange) else WHOLE))


def _base_of(exchange: Exchange) -> str:
    """The base in the header; "": it has none."""
    members = dictionary(exchange.request.headers.get(HEADER) or "") or {}
    base = members.get("base", "").strip('"')
    return base if chain_named(base) not in (None, EMPTY) else ""
