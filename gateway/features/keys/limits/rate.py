"""A rate per minute: the generic cell rate algorithm, with a burst of one minute. Pure.

The state is one number: the time at which everything taken so far is paid for at the rate. An amount taken without asking makes
a debt; an amount taken in excess can be returned. Both move that time, so nothing is lost. After an idle time, one minute's
amount may be taken at once. In any period of t minutes, at most the amount of t + 1 minutes is taken, plus the debt.
"""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 60.0
MAX_DEBT_S: Final = 600.0  # an engine may report any number of tokens


class Rate:
    """per_minute: positive. Times are monotonic seconds; a time that goes backwards counts as unchanged."""

    __slots__ = ("_paid_at", "_unit_s", "per_minute")

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._unit_s = PERIOD_S / per_minute
        self._paid_at = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds until this amount may be taken, 0: now. An amount above one minute's may be taken when there is no debt."""
        need = min(amount * self._unit_s, PERIOD_S)
        return max(0.0, max(self._paid_at, now) + need - now - PERIOD_S)

    def take(self, amount: int, now: float) -> None:
        """Takes the amount, even if it makes a debt. Negative: returns it."""
        paid_at = max(self._paid_at, now) + amount * self._unit_s
        self._paid_at = min(paid_at, now + PERIOD_S + MAX_DEBT_S)

    def available(self, now: float) -> int:
        """The amount that may be taken now."""
        return max(0, int((PERIOD_S - max(0.0, self._paid_at - now)) / self._unit_s + 1e-6))

    def resized(self, per_minute: int) -> Rate:
        """A rate with another limit; the time until the debt is paid stays the same."""
        rate = Rate(per_minute)
        rate._paid_at = self._paid_at
        return rate

    def __repr__(self) -> str:
        return f"<Rate {self.per_minute} per minute>"
