"""Consumed tokens -> money -> counters.

Tokens that the engine reports as written to its cache have their own price if it is configured, as with providers. A model
without a price costs nothing: its answers are counted, and one line in the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from gateway.accounting.consumed import CACHED, TOKENS, Consumption
from gateway.accounting.money import MOST, dollars
from gateway.accounting.prices import PriceBook, Rates
from gateway.config.live import Live
from gateway.config.schema import PriceConfig
from gateway.telemetry.counters import FirstValues
from gateway.telemetry.metrics import TENANTS, Metrics

log = logging.getLogger("warmroute.meter")

MAX_WARNED: Final = 1024  # names of models without a price in the log

_UNSURE: Final = (CACHED, TOKENS)  # the cached tokens are a prediction


class Bill:
    """The price of one answer, in picodollars (`money.py`). saved: what the cached tokens would have cost more as uncached
    ones; 0 if cached tokens are more expensive, because counters only rise, and the ledger must agree with them.

    Immutable by convention. A plain class, as `Usage` is.
    """

    __slots__ = ("cache_write", "cached_input", "image", "input", "output", "saved")

    def __init__(self, input_: int, cached_input: int, output: int, saved: int, cache_write: int = 0, image: int = 0) -> None:
        self.input = input_
        self.cached_input = cached_input
        self.output = output
        self.saved = saved
        self.cache_write = cache_write
        self.image = image

    @property
    def total(self) -> int:
        return self.input + self.cached_input + self.output + self.cache_write + self.image

    def __repr__(self) -> str:
        return f"<Bill of {dollars(self.total):.12g} USD>"


class Meter:
    """Counts tokens and money (see the module). now: Unix seconds, for prices that change."""

    def __init__(self, live: Live, metrics: Metrics, now: Callable[[], float]) -> None:
        self._live = live
        self._now = now
        self._prices: Mapping[str, tuple[PriceConfig, ...]] = live.prices  # the prices in the book
        self._book = PriceBook(live.prices)
        self._metrics = metrics
        self._tenants = FirstValues(TENANTS)
        self._warned = set[str]()

    def bill(self, model: str, used: Consumption) -> Bill | None:
        """The bill at the present prices. None if the model has no price."""
        usage, cached = used.usage, used.cached
        rates = self._rates(model, usage.prompt)
        if rates is None:
            return None
        written, cache_write = usage.written, 0
        if written:
            cache_write = (written - usage.hours) * rates.cache_write + usage.hours * rates.cache_write_1h
        return Bill(
            _bounded((usage.prompt - cached - written) * rates.input),
            _bounded(cached * rates.cached_input),
            _bounded(usage.completion * rates.output),
            _bounded(max(0, cached * (rates.input - rates.cached_input))),
            _bounded(cache_write),
            _bounded(used.images * rates.image),
        )

    def token_savings(self, model: str, prompt: int) -> int:
        """The present saving by one cached token of a prompt of this length; 0 without a price."""
        rates = self._rates(model, prompt)
        return 0 if rates is None else max(0, rates.input - rates.cached_input)

    def _rates(self, model: str, prompt: int) -> Rates | None:
        """The present prices."""
        prices = self._live.prices
        if prices is not self._prices:
            self._prices, self._book = prices, PriceBook(prices)
            self._warned.clear()
        return self._book.at(model, self._now()).of(prompt) if prices else None

    def count(self, used: Consumption, bill: Bill | None, *, model: str, replica: str, tenant: str) -> None:
        """Add one answer to the token and money counters. model: its label."""
        metrics, usage, cached = self._metrics, used.usage, used.cached
        metrics.prompt_tokens.add((model, replica, "miss"), usage.prompt - cached)
        metrics.prompt_tokens.add((model, replica, "estimated" if used.estimated in _UNSURE else "hit"), cached)
        metrics.completion_tokens.add((model, replica), usage.completion)
        if usage.written:
            metrics.cache_writes.add((model, replica), usage.written)
        if used.estimated:
            metrics.estimated.add((model, used.estimated))
        if bill is None:
            self._unpriced(model)
            return
        tenant = self._tenants.label(tenant)
        metrics.cost_usd.add((model, tenant, "input"), dollars(bill.input))
        metrics.cost_usd.add((model, tenant, "cached_input"), dollars(bill.cached_input))
        metrics.cost_usd.add((model, tenant, "output"), dollars(bill.output))
        if bill.cache_write:
            metrics.cost_usd.add((model, tenant, "cache_write"), dollars(bill.cache_write))
        if bill.image:
            metrics.cost_usd.add((model, tenant, "image"), dollars(bill.image))
        metrics.savings_usd.add((model, tenant), dollars(bill.saved))
        if used.estimated:
            metrics.estimated_cost_usd.add((model, tenant), dollars(bill.total))

    def _unpriced(self, model: str) -> None:
        if not self._prices:
            return  # money is not counted here
        self._metrics.unpriced.add((model,))
        if model not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(model)
            log.warning("no price is configured for a model: its answers cost nothing", extra={"model": model})


def _bounded(amount: int) -> int:
    return min(max(amount, -MOST), MOST)
