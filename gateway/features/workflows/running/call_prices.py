"""Prices of calls before they are made: of the dearest possible model, with the learned size of a token."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.accounting.consumed import Consumption
from gateway.accounting.money import dollars
from gateway.config.live import Live
from gateway.core import Core
from gateway.dialects.usage import Usage
from gateway.errors import GatewayError
from gateway.fleet.directory import Target


def model_of(name: str, live: Live) -> str:
    """The model that is served, and has the price, under this name."""
    return (live.aliases.of(name) if live.aliases else "") or name


class CallPrices:
    """Prices of models by the names that steps give them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def bytes_per_token(self, name: str) -> float:
        """The learned bytes of a prompt for a token: the fewest of the models that may answer. 4 until one is learned."""
        labels = [target.label for target in self._targets(name)] or [name]
        return min(map(self._core.router.units_per_token, labels))

    def worst_usd(self, name: str, prompt_tokens: int, answer_tokens: int) -> float:
        """The highest price of the model and of the models of its fallback pools, if nothing is cached; 0 without a price."""
        models = {model_of(name, self._core.live), *(target.model for target in self._targets(name))}
        consumption = Consumption(Usage(prompt_tokens, answer_tokens, 0))
        bills = (self._core.meter.bill(model, consumption) for model in models)
        return max((dollars(bill.total) for bill in bills if bill), default=0.0)

    def _targets(self, name: str) -> Iterator[Target]:
        """The target of a model, then the targets of its fallback pools. O(pools of the chain)."""
        fleet, seen = self._core.fleet, set[str]()
        try:
            target: Target | None = fleet.target(model_of(name, self._core.live))
        except GatewayError:  # the step will fail
            return
        while target is not None and target.pool not in seen:
            seen.add(target.pool)
            yield target
            fallback = target.fallback if self._core.extensions.fallback is not None else None
            if fallback is None:
                return
            model = fallback.model or target.model
            target = fleet.target_in(fallback.pool, model, fallback.model or target.label)
