"""What a token costs more when it is not cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.config.schema import MATCH_ALL, PriceConfig

_KNOWN: Final = 1024

Price = tuple[float, float]
"""USD per million tokens, uncached and cached."""


class Prices:
    """By model: of those that are configured, the longest name that it begins with. fixed: instead, for all models."""

    def __init__(self, prices: Mapping[str, PriceConfig] | None = None, fixed: Price | None = None) -> None:
        self._prices = prices or {}
        self._fixed = fixed
        self._known = dict[str, Price | None]()

    def of(self, model: str) -> Price | None:
        """None: no price is known. O(1) for a model that was asked before."""
        if self._fixed is not None or not self._prices:
            return self._fixed
        if model not in self._known:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[model] = self._find(model)
        return self._known[model]

    def _find(self, model: str) -> Price | None:
        names = [name for name in self._prices if name == MATCH_ALL or model.startswith(name)]
        if not names:
            return None
        price = self._prices[max(names, key=lambda name: 0 if name == MATCH_ALL else len(name))]
        return price.input, price.cached_input or 0.0
