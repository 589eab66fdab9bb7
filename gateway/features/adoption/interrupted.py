"""Answers that were cancelled at the end of the grace.

The same request has come after that, so its next answer gets a longer grace. The engine still has the computed part of a
prefill, but the index has no credit for it, because its size is unknown: the request goes to that replica, if the computed
time makes it the cheapest one. At most MAX_KNOWN are known, for TTL_S.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

from gateway.features.adoption.identity import Identity, identity_of
from gateway.features.adoption.kept_answer import KeptAnswer
from gateway.request.exchange import Exchange
from router import Router

TTL_S: Final = 600.0
MAX_KNOWN: Final = 1000


class _InterruptedAnswer(NamedTuple):
    """computed_s, left_at: as in `add`. until: reading of the clock."""

    replica: str
    computed_s: float
    left_at: float
    until: float


class InterruptedAnswers:
    """The interrupted answers of one process (see the module)."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._known = OrderedDict[Identity, _InterruptedAnswer]()  # the oldest first

    def __len__(self) -> int:
        return len(self._known)

    def add(self, identity: Identity, replica: str, computed_s: float, left_at: float, now: float) -> None:
        """A request is cancelled. computed_s: seconds of its prefill, at most; 0: it had a token. left_at: when its client
        left. O(1).
        """
        self._known.pop(identity, None)
        self._known[identity] = _InterruptedAnswer(replica, computed_s, left_at, now + TTL_S)
        while len(self._known) > MAX_KNOWN or next(iter(self._known.values())).until <= now:
            self._known.popitem(last=False)

    def chosen(self, exchange: Exchange, live: Collection[str], now: float) -> None:
        """A replica is chosen: moves the booking if the same request was interrupted in its prefill on another one."""
        keeper = exchange.request.keeper
        if not (self._known and isinstance(keeper, KeptAnswer)):
            return
        found = self._known.pop(identity_of(exchange, keeper.identify()), None)
        booking = exchange.booking
        if found is None or found.until <= now:
            return
        keeper.pause_s = now - found.left_at
        if not found.computed_s or found.replica not in live or found.replica == booking.chosen.replica:
            return
        there = self._router.rank(booking.prompt, [found.replica], now)[0].best.cost
        if there.total_s - min(found.computed_s, there.prefill_s) < booking.chosen.cost.total_s:
            booking.move([found.replica], now)
            exchange.record.placement.reason = booking.decision.reason

    def __repr__(self) -> str:
        return f"<InterruptedAnswers {len(self._known)}>"
