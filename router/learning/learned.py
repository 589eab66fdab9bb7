"""Estimators over a stream of observations, in O(1) memory."""

from __future__ import annotations

import math


class Ratio:
    """A quotient of two decaying sums (tokens / seconds, units / tokens), so that observations count by their size. Evidence
    halves with every `half_life` of further weight. `value` is the quotient; it starts as a prior with the evidence of a given
    weight.
    """

    __slots__ = ("_over", "_under", "half_life", "value")

    def __init__(self, value: float, weight: float, half_life: float) -> None:
        """value: prior, with the evidence of a denominator of `weight`."""
        self._over = value * weight
        self._under = weight
        self.half_life = half_life
        self.value = value

    def learn(self, over: float, under: float, weight: float) -> None:
        """Add one observation; over and under positive."""
        keep = math.pow(0.5, weight / self.half_life)  # 0 for a large weight. Compiled, five times as fast as `**`
        self._over = self._over * keep + over
        self._under = self._under * keep + under
        self.value = self._over / self._under

    @property
    def sums(self) -> tuple[float, float]:
        return self._over, self._under

    def restore(self, sums: tuple[float, float]) -> None:
        """Take over the sums of another one; both positive."""
        self._over, self._under = sums
        self.value = self._over / self._under

    def near(self, seen: float) -> float:
        """`seen`, clamped to a factor of two around the value: one observation may be wrong."""
        return min(max(seen, self.value / 2), self.value * 2)

    def __repr__(self) -> str:
        return f"<Ratio {self.value:.6g}>"


class Median:
    """A streaming weighted median: every observation moves it by a small factor towards itself."""

    __slots__ = ("_high", "_low", "value")

    _STEP = 0.1  # the logarithm of the factor at full weight

    def __init__(self, value: float, low: float, high: float) -> None:
        self.value = value
        self._low = low
        self._high = high

    def learn(self, seen: float, weight: float) -> None:
        """weight: between 0 and 1."""
        factor = math.exp(self._STEP * weight)
        self.restore(self.value * factor if seen > self.value else self.value / factor)

    def restore(self, value: float) -> None:
        """Take over the value of another one."""
        self.value = min(self._high, max(self._low, value))

    def __repr__(self) -> str:
        return f"<Median {self.value:.6g}>"
