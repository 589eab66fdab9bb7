"""What is learned from a stream of observations, in O(1) memory, the old fading as the new comes in.

Each value is sane before its first observation: it begins as a belief that is worth a stated amount of evidence.
"""

from __future__ import annotations

import math


class Ratio:
    """A quotient of two sums (tokens / seconds, units / tokens) that forgets: sums keep small observations from drowning large
    ones. Evidence halves with every `half_life` of further weight; `value` is the quotient.
    """

    __slots__ = ("_half_life", "_over", "_under", "value")

    def __init__(self, value: float, weight: float, half_life: float) -> None:
        """Believe `value`, as if it had been seen in a denominator of `weight`."""
        self._over = value * weight
        self._under = weight
        self._half_life = half_life
        self.value = value

    def learn(self, over: float, under: float, weight: float) -> None:
        """Take one observation in; over and under positive."""
        keep = math.pow(0.5, weight / self._half_life)  # of floats, which ** may not be: compiled, a fifth of its time
        self._over = self._over * keep + over
        self._under = self._under * keep + under
        self.value = self._over / self._under

    def after(self, over: float, under: float, weight: float) -> float:
        """What the value would be after `learn`."""
        fades = math.exp2(weight / self._half_life)
        return (self._over / fades + over) / (self._under / fades + under)

    def near(self, seen: float) -> float:
        """What was seen, but no further than a factor of two from what is believed: one observation may be wrong."""
        return min(max(seen, self.value / 2), self.value * 2)

    def __repr__(self) -> str:
        return f"<Ratio {self.value:.6g}>"


class Median:
    """A weighted median that follows the stream: every observation moves it by a small factor towards itself."""

    __slots__ = ("_high", "_low", "value")

    _STEP = 0.1  # the logarithm of the factor at full weight

    def __init__(self, value: float, low: float, high: float) -> None:
        self.value = value
        self._low = low
        self._high = high

    def learn(self, seen: float, weight: float) -> None:
        """weight: between 0 and 1."""
        factor = math.exp(self._STEP * weight)
        self.value = min(self._high, max(self._low, self.value * factor if seen > self.value else self.value / factor))

    def __repr__(self) -> str:
        return f"<Median {self.value:.6g}>"
