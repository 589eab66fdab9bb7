"""Usage -> tokens -> money.

What an engine reports is the truth; what it does not report is unknown, not zero: without a count of cached tokens the
whole prompt is priced as uncached and nothing is claimed as saved. Tokens that the engine reports as written to its cache have
prices of their own where these are configured, as providers do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pygtrie

from gateway.config.live import Live
from gateway.config.schema import MATCH_ALL, PriceConfig
from gateway.dialects.usage import Usage
from gateway.telemetry.counters import FirstValues
from gateway.telemetry.metrics import TENANTS, Metrics

MAX_KNOWN: Final = 1024


class Bill(NamedTuple):
    """USD. saved: what the cached tokens would have cost more as uncached ones."""

    input: float
    cached_input: float
    output: float
    saved: float
    cache_write: float = 0.0

    @property
    def total(self) -> float:
        return self.input + self.cached_input + self.output + self.cache_write


class Meter:
    """Prices answers and counts them. Prices are looked up by the longest matching model-name prefix."""

    def __init__(self, live: Live, metrics: Metrics) -> None:
        self._live = live
        self._prices: Mapping[str, PriceConfig] = {}  # those that are in the trie
        self._trie: Any = None
        self._known: dict[str, PriceConfig | None] = {}  # by model, as far as they were looked up
        self._metrics = metrics
        self._tenants = FirstValues(TENANTS)
        self._take_prices(live.prices)

    def bill(self, model: str, usage: Usage) -> Bill | None:
        """None when no price is configured for the model."""
        if self._live.prices is not self._prices:
            self._take_prices(self._live.prices)
        price = self._known[model] if model in self._known else self._price(model)
        if price is None:
            return None
        cached, cached_input = usage.cached or 0, price.cached_input or 0.0
        written, cache_write = usage.written, 0.0
        if written:
            five_minutes, hour = price.cache_write or 0.0, price.cache_write_1h or 0.0
            cache_write = ((written - usage.hours) * five_minutes + usage.hours * hour) / 1e6
        return Bill(
            input=(usage.prompt - cached - written) * price.input / 1e6,
            cached_input=cached * cached_input / 1e6,
            output=usage.completion * price.output / 1e6,
            saved=cached * (price.input - cached_input) / 1e6,
            cache_write=cache_write,
        )

    def _take_prices(self, prices: Mapping[str, PriceConfig]) -> None:
        self._prices, self._trie = prices, pygtrie.CharTrie()
        self._known.clear()
        for model, price in prices.items():
            self._trie["" if model == MATCH_ALL else model] = price

    def _price(self, model: str) -> PriceConfig | None:
        match = self._trie.longest_prefix(model)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()  # any name may be one that a prefix takes
        price: PriceConfig | None = match.value if match else None
        self._known[model] = price
        return price

    def count(self, usage: Usage, bill: Bill | None, *, model: str, replica: str, tenant: str) -> None:
        """Add one answer to the token and money counters. model: its label."""
        metrics = self._metrics
        cached = usage.cached or 0
        metrics.prompt_tokens.add((model, replica, "miss"), usage.prompt - cached)
        metrics.prompt_tokens.add((model, replica, "hit"), cached)
        metrics.completion_tokens.add((model, replica), usage.completion)
        if usage.written:
            metrics.cache_writes.add((model, replica), usage.written)
        if bill:
            tenant = self._tenants.label(tenant)
            metrics.cost_usd.add((model, tenant, "input"), bill.input)
            metrics.cost_usd.add((model, tenant, "cached_input"), bill.cached_input)
            metrics.cost_usd.add((model, tenant, "output"), bill.output)
            if bill.cache_write:
                metrics.cost_usd.add((model, tenant, "cache_write"), bill.cache_write)
            metrics.savings_usd.add((model, tenant), max(0.0, bill.saved))  # a price list can be upside down
