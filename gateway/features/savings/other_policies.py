"""What other policies would have found cached (`routing.compare`)."""

from __future__ import annotations

from gateway.accounting.meter import Meter
from gateway.features.savings.counterfactual import Counterfactual
from gateway.features.savings.savings import Savings
from gateway.request.record import SettledRequest


class OtherPolicies:
    """Counts what other policies would have found cached, and what that is worth (`features/savings/counterfactual.py`)."""

    def __init__(self, counterfactual: Counterfactual, meter: Meter, savings: Savings) -> None:
        self._counterfactual = counterfactual
        self._meter = meter
        self._savings = savings

    def __call__(self, request: SettledRequest) -> None:
        placed, booking, used = request.placed, request.booking, request.consumed
        if placed is None:
            return
        self._counterfactual.ended(placed)
        if booking is None or used is None or request.usage is None or request.usage.cached is None or not request.ok:
            return  # what the engine has delivered is not known
        decision, prompt = booking.decision, used.usage.prompt
        scale = prompt / max(1, decision.prompt_tokens)
        cached = [min(each * scale, prompt) for each in placed.cached]
        token_s = 1 / decision.best.prefill_rate if decision.best.prefill_rate > 0 else 0.0
        self._savings.add(prompt, used.cached, cached, token_s, self._meter.token_savings(request.model, prompt))
