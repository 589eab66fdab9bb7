"""Prices of uncached and cached tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.accounting.money import PER_MILLION
from gateway.accounting.prices import PriceBook
from gateway.config.schema import PriceConfig

Price = tuple[float, float]
"""USD per million tokens, uncached and cached."""


class DoctorPrices:
    """The configured prices by model, time and length of the prompt. fixed: one price for all instead."""

    def __init__(self, prices: Mapping[str, Sequence[PriceConfig]] | None = None, fixed: Price | None = None) -> None:
        self._book = PriceBook(prices) if prices else None
        self._fixed = fixed

    def of(self, model: str, tokens: int, now: float) -> Price | None:
        """None: no price is known. tokens: of the prompt. now: Unix seconds."""
        if self._fixed is not None or self._book is None:
            return self._fixed
        rates = self._book.at(model, now).of(tokens)
        return (rates.input / PER_MILLION, rates.cached_input / PER_MILLION) if rates else None
