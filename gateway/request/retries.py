"""Retries: their budget, and the pause before each."""

from __future__ import annotations

from random import Random

RETRY_BASE_S, RETRY_MOST_S = 0.025, 0.25


class RetryBudget:
    """At most ratio * requests + burst retries. All operations O(1)."""

    __slots__ = ("_burst", "_left", "_ratio")

    def __init__(self, ratio: float = 0.2, burst: float = 100) -> None:
        self._ratio = ratio
        self._burst = burst
        self._left = float(burst)

    def request(self) -> None:
        """Count a received request (retries excluded)."""
        left = self._left + self._ratio
        self._left = left if left < self._burst else self._burst

    def take(self) -> bool:
        """Spend one retry. False: the budget is used up."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Return a retry that was taken but not made."""
        left = self._left + 1
        self._left = left if left < self._burst else self._burst

    def __repr__(self) -> str:
        return f"<RetryBudget {self._left:.3g} of {self._burst:g}>"


def jitter(attempt: int, chance: Random, *, at_once: bool = False) -> float:
    """Seconds to pause before a retry. attempt: 1 for the first. at_once: the first retry needs no pause (the connection was
    refused).
    """
    if at_once and attempt == 1:
        return 0.0
    return chance.random() * min(RETRY_MOST_S, RETRY_BASE_S * 2.0 ** min(attempt - 1, 10))
