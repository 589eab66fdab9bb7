"""Feeds requests to the simulation of other policies (`routing.compare`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.accounting.meter import Meter
from gateway.features.savings.counterfactual import Counterfactual, ShadowPlacement
from gateway.features.savings.savings import Savings
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot

_PLACED: Final = Slot[ShadowPlacement]("savings")


class OtherPolicies:
    """Simulates each request under the other policies, and counts the differences (`features/savings/counterfactual.py`)."""

    def __init__(self, counterfactual: Counterfactual, meter: Meter, savings: Savings) -> None:
        self._counterfactual = counterfactual
        self._meter = meter
        self._savings = savings

    def chosen(self, exchange: Exchange, live: Collection[str], now: float) -> None:
        """Places the request under the other policies."""
        booking, record = exchange.booking, exchange.record
        if record.subject.metered and _PLACED.get(record) is None:
            decision = booking.decision
            placed = self._counterfactual.choose(booking.prompt, live, booking.chosen.replica, decision.prompt_tokens, now)
            _PLACED.set(record, placed)

    def __call__(self, request: SettledRequest) -> None:
        placed, booking, used = _PLACED.get(request), request.booking, request.spent.consumed
        if placed is None:
            return
        self._counterfactual.end(placed)
        if (
            booking is None
            or used is None
            or request.spent.usage is None
            or request.spent.usage.cached is None
            or not request.answer.ok
        ):
            return  # without reported cached tokens there is no comparison
        decision, prompt = booking.decision, used.usage.prompt
        scale = prompt / max(1, decision.prompt_tokens)
        cached = [min(each * scale, prompt) for each in placed.cached]
        token_s = 1 / decision.best.prefill_rate if decision.best.prefill_rate > 0 else 0.0
        self._savings.add(prompt, used.cached, cached, token_s, self._meter.token_savings(request.subject.model, prompt))
