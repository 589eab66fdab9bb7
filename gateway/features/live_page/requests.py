"""Feeds requests to the live page (`features/live_page/feed.py`): when their replica is chosen, and when they have ended.

It observes only during a watch. Then each decision is also ranked a second time with the price of every candidate, for
"explain". Texts from clients and replicas are cut and made encodable here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.accounting.money import dollars
from gateway.features.live_page.feed import Feed, Row
from gateway.features.live_page.under_way import sender_of, shown_name
from gateway.request.exchange import Exchange
from gateway.request.extensions import Explainer
from gateway.request.named_log import NAMED_LOG
from gateway.request.record import SettledRequest
from gateway.request.settle import Observer
from gateway.request.slots import Slot
from router import Candidate, Decision

ERROR_CHARS: Final = 300
MAX_CANDIDATES: Final = 64  # the best of them, and the chosen one
MAX_ATTEMPTS: Final = 8
HEAD_BYTES: Final = 8  # the key of the first block


class ShownRow:
    """The row of a request. number: in the feed; -1: none. since: Unix seconds at which the row was made; 0: not yet."""

    __slots__ = ("number", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = 0.0


_SHOWN: Final = Slot[ShownRow]("live page")


class LiveRequests(Explainer):
    """Explains decisions and observes ends. now: Unix seconds."""

    def __init__(self, feed: Feed, explainers: list[Explainer], observers: list[Observer], now: Callable[[], float]) -> None:
        """explainers, observers: of the gateway; this object is in both lists during a watch."""
        self._feed = feed
        self._explainers = explainers
        self._observers = observers
        self._now = now
        feed.begin, feed.end = self._begin, self._end

    def _begin(self) -> None:
        self._explainers.append(self)
        self._observers.append(self)

    def _end(self) -> None:
        self._explainers.remove(self)
        self._observers.remove(self)

    def wants(self, exchange: Exchange, now: float) -> bool:
        return self._shown(exchange.record, now).number > 0

    def _shown(self, request: SettledRequest, now: float) -> ShownRow:
        """The row of a request, made now if it has none. now: of the gateway's clock."""
        shown = _SHOWN.get(request)
        if shown is None:
            shown = ShownRow(self._feed.number(now) or -1)
            _SHOWN.set(request, shown)
        return shown

    def explain(self, exchange: Exchange, policy: str, ranking: list[Candidate]) -> None:
        """Puts the row of a running request. O(MAX_CANDIDATES)."""
        request, decision, pool = exchange.record, exchange.booking.decision, exchange.target.pool
        shown = self._shown(request, request.begun)
        row = _row(request, shown.since or self._now())
        shown.since = row["time"]
        row |= {
            "pool": shown_name(pool),
            "replica": shown_name(decision.best.replica),
            "reason": decision.reason,
            "estimated_prompt_tokens": decision.prompt_tokens,
            "predicted_cached_tokens": decision.best.matched_tokens,
        }
        candidates = list(ranking[:MAX_CANDIDATES])
        if all(each.replica != decision.best.replica for each in candidates):
            candidates[-1:] = [decision.best]
        further = max(0, len(ranking) - len(candidates))
        self._feed.put(shown.number, row, lambda: _reasons(policy, pool, decision, candidates, further))

    def __call__(self, request: SettledRequest) -> None:
        self._feed.ended += 1
        shown = self._shown(request, request.ended)
        if shown.number > 0:
            since = shown.since or self._now() - (request.ended - request.begun)
            self._feed.put(shown.number, _ended(request, since))


def _reasons(policy: str, pool: str, decision: Decision, candidates: list[Candidate], further: int) -> Row:
    """further: number of candidates that are not among these."""
    return {
        "policy": policy,
        "pool": shown_name(pool),
        "replica": shown_name(decision.best.replica),
        "reason": decision.reason,
        "promise": decision.promise,
        "promised_tokens": decision.promised_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "available_tokens": decision.available_tokens,
        "candidates": [_candidate(each) for each in candidates],
        "further": further,
    }


def _candidate(candidate: Candidate) -> Row:
    cost = {**candidate.cost._asdict(), "total_s": candidate.cost.total_s}
    return {**candidate._asdict(), "replica": shown_name(candidate.replica), "cost": cost}


def _row(request: SettledRequest, since: float) -> Row:
    """The columns of running and ended requests."""
    booking = request.booking
    keys = b"" if booking is None else booking.prompt.keys
    log = NAMED_LOG.get(request)
    return {
        "id": shown_name(request.id),
        "state": "running",
        "time": since,
        "endpoint": request.subject.endpoint,
        "model": shown_name(request.subject.model),
        **sender_of(request),
        "stream": request.subject.stream,
        "head": keys[:HEAD_BYTES].hex(),
        "blocks": len(keys) // HEAD_BYTES,
        "log_entries": None if log is None else log.length,
        "log_sent": "" if log is None else log.sent,
    }


def _ended(request: SettledRequest, since: float) -> Row:
    placement, answer, spent = request.placement, request.answer, request.spent
    used, bill, first = spent.consumed, spent.bill, answer.first_token
    attempts = [
        {key: shown_name(str(value)) for key, value in attempt.items()} for attempt in placement.failed_attempts[:MAX_ATTEMPTS]
    ]
    ended: dict[str, Any] = {
        "state": "ended",
        "pool": shown_name(placement.pool),
        "replica": shown_name(placement.replica),
        "reason": placement.reason,
        "status": request.status,
        "code": request.told_code,
        "error": request.error[:ERROR_CHARS].encode("utf-8", "replace").decode(),
        "estimated_prompt_tokens": placement.estimated_prompt_tokens,
        "predicted_cached_tokens": placement.predicted_cached_tokens,
        "prompt_tokens": used.usage.prompt if used else None,
        "cached_tokens": used.cached if used else None,
        "completion_tokens": used.usage.completion if used else None,
        "estimated": used.estimated if used else "",
        "ttft_s": None if first is None else max(0.0, first - request.begun),
        "queued_s": placement.queued_s,
        "seconds": max(0.0, request.ended - request.begun),
        "cost_usd": dollars(bill.total) if bill else None,
        "saved_usd": dollars(bill.saved) if bill else None,
        "resumed": answer.resumed,
        "failed_attempts": attempts,
        "fallback": shown_name(" -> ".join((*placement.passed, placement.pool))) if placement.passed else "",
        "cancelled": request.cancelled,
    }
    return {**_row(request, since), **ended}
