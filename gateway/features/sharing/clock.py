"""Converts the times of another machine's events to this machine's clock, through the store's clock.

The store dates each entry. Each entry of our own measures the difference between the two clocks: the store dated it between our
sending and its answer. The measurement with the shortest round trip is used, until it is too old. So the gateways' wall clocks
do not matter. The store's clock may be wrong, as long as it runs evenly.

The result is bounded: at most now, at least MAX_PAST_S ago. A clock that was set may suggest another time.
"""

from __future__ import annotations

import math
from typing import Final

KEEP_S: Final = 60.0  # lifetime of a measurement
STEP_S: Final = 0.1  # a greater difference means that the store's clock was set, or that it is another store
MAX_PAST_S: Final = 86_400.0


class StoreClock:
    """See the top of this file. Seconds; `now` is this machine's monotonic clock."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None  # the store's clock less ours
        self._rtt_s = math.inf
        self._measured_at = -math.inf

    def forget(self) -> None:
        """Discard the measurement: the next store may be another one."""
        self._ahead_s, self._rtt_s, self._measured_at = None, math.inf, -math.inf

    def measure(self, before: float, after: float, store: float) -> None:
        """Add a measurement: the store's clock showed `store` between these two moments."""
        ahead_s, rtt_s = store - (before + after) / 2, after - before
        stepped = self._ahead_s is not None and abs(ahead_s - self._ahead_s) > (rtt_s + self._rtt_s) / 2 + STEP_S
        if stepped or rtt_s <= self._rtt_s or after - self._measured_at > KEEP_S:
            self._ahead_s, self._rtt_s, self._measured_at = ahead_s, rtt_s, after

    def local(self, store: float, now: float) -> float:
        """Convert a time of the store; at most `now`, and `now` without a measurement."""
        return now if self._ahead_s is None else min(now, store - self._ahead_s)

    def store(self, now: float) -> float | None:
        """The store's time; None without a measurement."""
        return None if self._ahead_s is None else now + self._ahead_s

    def __repr__(self) -> str:
        return f"<StoreClock {self._ahead_s} s ahead, +-{self._rtt_s / 2} s>"


def plausible(time: float, now: float) -> float:
    """The time within its bounds; `now` if it is not finite."""
    return min(now, max(time, now - MAX_PAST_S)) if math.isfinite(time) else now
