"""The wait of a request whose prefix another request is computing (`router/leading.py`), or that waits in the line of its
replica (`router/late.py`).

    choose ──► no lead ──────────────────────────────────────────► attempt
       │                 computed, its turn in line, or late ──►──┤
       └──► a lead: wait ┤                                        │
              ▲          lost: the lead failed, left, or moved,   │
              │          or the match was evicted ────────► choose again ──► no lead: this one computes it, and leads
              └───────────────────────────────────────────────────────┘

A request without a lead costs one look at its booking, and waits for nothing. The whole wait is bounded by MAX_LEAD_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.request.exchange import Exchange
from gateway.request.phases.choosing import ChoosePhase
from gateway.telemetry.metrics import Metrics
from router import MAX_LEAD_S, Lead

COMPUTED, LATE, LOST, LEFT = "computed", "late", "lost", "left"


class HoldPhase:
    """Holds requests back for their leads (see the module). clock: monotonic seconds, the router's."""

    def __init__(self, choosing: ChoosePhase, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._choosing = choosing
        self._metrics = metrics
        self._clock = clock

    async def wait(self, exchange: Exchange) -> None:
        """Wait for the booking's lead. Raises CancelledError if the client leaves; the booking is closed by others then."""
        booking, begun = exchange.booking, self._clock()
        outcome = LEFT
        try:
            while (lead := booking.lead) is not None:
                left_s = begun + MAX_LEAD_S - self._clock()
                outcome = await _outcome(lead, left_s) if left_s > 0 else LATE
                if booking.release(self._clock()):
                    outcome = LOST
                    self._choosing.again(exchange)
        finally:
            waited_s = self._clock() - begun
            exchange.record.placement.held_s += waited_s
            self._metrics.held_seconds.observe((outcome,), waited_s)


async def _outcome(lead: Lead, left_s: float) -> str:
    """Wait until the lead is over, at most left_s."""
    loop = asyncio.get_running_loop()
    begun, woken = loop.time(), asyncio.Event()
    lead.watch(woken.set)
    try:
        if lead.over:
            await asyncio.sleep(0)  # the line has ended: after the requests that were called before this one
        elif not lead.computed:
            await _within(woken, min(lead.most_s, left_s))
        if lead.after_s and lead.computed and not lead.over:
            woken.clear()
            await _within(woken, min(lead.after_s, begun + left_s - loop.time()))
    finally:
        lead.unwatch(woken.set)
    return COMPUTED if lead.over else LATE


async def _within(woken: asyncio.Event, seconds: float) -> None:
    timer = asyncio.get_running_loop().call_later(seconds, woken.set)
    try:
        await woken.wait()
    finally:
        timer.cancel()
