"""A rate per minute: the generic cell rate algorithm, with a minute's worth of burst. Pure.

One number, the time at which everything that was taken has been paid for at the rate. What is taken without asking makes a
debt, and what was taken too much is given back: both move that time, and nothing is lost of either. Whoever was idle may take
a minute's worth at once; in any longer time t, at most t + 1 minutes' worth is taken, and the debt.
"""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 60.0
MAX_DEBT_S: Final = 600.0  # an engine may report any number of tokens


class Rate:
    """per_minute: more than 0. Times are monotonic seconds; one that goes back counts as no time."""

    __slots__ = ("_paid_at", "_unit_s", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._unit_s = PERIOD_S / per_minute
        self._paid_at = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds until this much may be taken, 0: now. More than a minute's worth may be, when nothing else is owed."""
        need = min(amount * self._unit_s, PERIOD_S)
        return max(0.0, max(self._paid_at, now) + need - now - PERIOD_S)

    def take(self, amount: int, now: float) -> None:
        """Whether there is that much or not. amount: negative: it is given back."""
        paid_at = max(self._paid_at, now) + amount * self._unit_s
        self._paid_at = min(paid_at, now + PERIOD_S + MAX_DEBT_S)

    def left(self, now: float) -> int:
        """What may be taken now."""
        return max(0, int((PERIOD_S - max(0.0, self._paid_at - now)) / self._unit_s + 1e-6))

    def resized(self, per_minute: int) -> Rate:
        """Another rate; what is owed stays the same in time."""
        other = Rate(per_minute)
        other._paid_at = self._paid_at
        return other

    def __repr__(self) -> str:
        return f"<Rate {self.per_minute} per minute>"
