"""The requests of this process that have not ended, for the live page: their senders, and the causes of their waits.

They are read from the running requests when a watcher asks, so that a request that began before the watch is there, too, and
requests cost nothing more. A request is here from SHOWN_AFTER_S on. Bounds: of the MAX_LOOKED oldest requests MAX_ROWS that
wait in a queue, and as many others, get a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest

SHOWN_AFTER_S: Final = 1.0  # of its life; younger ones would only flicker
MAX_ROWS: Final = 50
MAX_LOOKED: Final = 10_000
MAX_CHARS: Final = 100  # per name

QUEUED, RECEIVING, PREPARING, COMPUTING, ANSWERING = "queued", "receiving", "preparing", "computing", "answering"

Row = dict[str, Any]


def rows_under_way(exchanges: Iterable[Exchange], now: float, offset: float) -> list[Row]:
    """The rows, the oldest first. now: of the gateway's clock; offset: from it to Unix seconds. O(MAX_LOOKED)."""
    waiting, others = list[Row](), list[Row]()
    for exchange in islice(exchanges, MAX_LOOKED):
        if now - exchange.record.begun < SHOWN_AFTER_S:
            continue
        rows = others if exchange.place is None else waiting
        if len(rows) < MAX_ROWS:
            rows.append(_row(exchange, offset))
    return sorted([*waiting, *others], key=lambda row: float(row["time"]))


def sender_of(request: SettledRequest) -> Row:
    """The sender of a request. All texts are bounded."""
    sender = request.sender
    return {
        "tenant": sender.tenant,
        "api_key": sender.key,
        "session": sender.session[:MAX_CHARS],
        "agent": sender.agent[:MAX_CHARS],
        "parent": sender.parent[:MAX_CHARS],
        "client": sender.client,
        "user_agent": sender.user_agent[:MAX_CHARS],
    }


def shown_name(text: str) -> str:
    """The text, cut and encodable in UTF-8."""
    return text[:MAX_CHARS].encode("utf-8", "replace").decode()


def _row(exchange: Exchange, offset: float) -> Row:
    record, place = exchange.record, exchange.place
    found = place.found() if place is not None else None
    booked = exchange.booked and not exchange.booking.lease.closed
    model = record.subject.model or (exchange.api.model if exchange.parsed else "")
    return {
        "id": shown_name(record.id),
        "time": record.begun + offset,
        "endpoint": record.subject.endpoint,
        "model": shown_name(model),
        **sender_of(record),
        "stream": record.subject.stream,
        "attended": exchange.request.attended,
        "state": _state(exchange, booked=booked),
        "place": found[0] if found is not None else None,
        "expected_s": found[1] if found is not None else None,
        "replica": shown_name(exchange.booking.chosen.replica) if booked else "",
        "prompt_tokens": exchange.booking.lease.prompt_tokens if booked else None,
        "uncached_tokens": exchange.booking.lease.uncached_tokens if booked else None,
        "failed_attempts": len(exchange.attempts.failed),
    }


def _state(exchange: Exchange, *, booked: bool) -> str:
    if exchange.place is not None:
        return QUEUED
    if not exchange.parsed:
        return RECEIVING
    if not booked:
        return PREPARING
    began = exchange.delivered.first_token is not None or exchange.booking.lease.decoding
    return ANSWERING if began else COMPUTING
