"""Usage -> tokens -> money.

What an engine reports is the truth; what it does not report is unknown, not zero: without a count of cached tokens the
whole prompt is priced as uncached and nothing is claimed as saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pygtrie

from gateway.config import MATCH_ALL, PriceConfig
from gateway.metrics import TENANTS, Metrics

MAX_KNOWN: Final = 1024
MAX_TOKENS: Final = 1_000_000_000  # of one answer; an engine that reports more is not believed


class Usage(NamedTuple):
    """Tokens of one answer as the engine counted them. prompt includes cached; cached is None where it is not reported."""

    prompt: int
    completion: int
    cached: int | None = None


class Bill(NamedTuple):
    """USD. saved: what the cached tokens would have cost more as uncached ones."""

    input: float
    cached_input: float
    output: float
    saved: float

    @property
    def total(self) -> float:
        return self.input + self.cached_input + self.output


def parse_usage(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of an OpenAI-shaped answer or last chunk, None if it has none that makes sense.

    Cached tokens: `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang, llama.cpp), `prompt_cache_hit_tokens`
    (DeepSeek). A count beyond the prompt is cut to it. A count beyond MAX_TOKENS makes no sense.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage.get("prompt_tokens")), usage.get("completion_tokens")
    if prompt is None or (isinstance(completion, int) and completion > MAX_TOKENS):
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = _count(usage.get("prompt_cache_hit_tokens"))
    return Usage(prompt, _count(completion) or 0, None if cached is None else min(cached, prompt))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


class Meter:
    """Prices answers and counts them. Prices are looked up by the longest matching model-name prefix."""

    def __init__(self, prices: Mapping[str, PriceConfig], metrics: Metrics) -> None:
        self._prices: Any = None
        self._known: dict[str, PriceConfig | None] = {}  # what models cost, as far as anybody asked
        self._metrics = metrics
        self._tenants: set[str] = set()
        self.reprice(prices)

    def reprice(self, prices: Mapping[str, PriceConfig]) -> None:
        """From now on these prices."""
        self._known = {}
        self._prices = pygtrie.CharTrie()
        for model, price in prices.items():
            self._prices["" if model == MATCH_ALL else model] = price

    def bill(self, model: str, usage: Usage) -> Bill | None:
        """None when no price is configured for the model."""
        price = self._known[model] if model in self._known else self._price(model)
        if price is None:
            return None
        cached, cached_input = usage.cached or 0, price.cached_input or 0.0
        return Bill(
            input=(usage.prompt - cached) * price.input / 1e6,
            cached_input=cached * cached_input / 1e6,
            output=usage.completion * price.output / 1e6,
            saved=cached * (price.input - cached_input) / 1e6,
        )

    def _price(self, model: str) -> PriceConfig | None:
        match = self._prices.longest_prefix(model)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()  # any name may be one that a prefix takes
        price: PriceConfig | None = match.value if match else None
        self._known[model] = price
        return price

    def _label(self, tenant: str) -> str:
        """A bounded label: the first TENANTS distinct tenants by name, any further as "other"."""
        if tenant not in self._tenants:
            if len(self._tenants) >= TENANTS:
                return "other"
            self._tenants.add(tenant)
        return tenant

    def count(self, usage: Usage, bill: Bill | None, *, model: str, replica: str, tenant: str) -> None:
        """Add one answer to the token and money counters. model: its label."""
        metrics = self._metrics
        cached = usage.cached or 0
        metrics.prompt_tokens.add((model, replica, "miss"), usage.prompt - cached)
        metrics.prompt_tokens.add((model, replica, "hit"), cached)
        metrics.completion_tokens.add((model, replica), usage.completion)
        if bill:
            tenant = self._label(tenant)
            metrics.cost_usd.add((model, tenant, "input"), bill.input)
            metrics.cost_usd.add((model, tenant, "cached_input"), bill.cached_input)
            metrics.cost_usd.add((model, tenant, "output"), bill.output)
            metrics.savings_usd.add((model, tenant), max(0.0, bill.saved))  # a price list can be upside down
