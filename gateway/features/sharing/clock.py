"""Converts times of another machine's events to this machine's clock, by the store's clock.

The store dates each entry. The difference between its clock and ours is measured with each entry of our own, which was dated
between sending it and receiving the answer. The measurement with the shortest time between the two is used until it is too old.
So the wall clocks of the gateways do not matter. The store's clock may be wrong, too, as long as it runs evenly.

An event is never later than now, nor older than MAX_PAST_S; a time outside these bounds comes from a clock that was set.
"""

from __future__ import annotations

import math
from typing import Final

KEEP_S: Final = 60.0  # lifetime of a measurement
STEP_S: Final = 0.1  # a larger difference is not inaccuracy: the store's clock was set, or it is another store
MAX_PAST_S: Final = 86_400.0


class StoreClock:
    """Estimates the store's clock. Times are in seconds; `now` is this machine's monotonic clock."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None  # the store's clock minus ours
        self._rtt_s = math.inf
        self._measured_at = -math.inf

    def forget(self) -> None:
        """Drops the measurement, because the next connection may lead to another store."""
        self._ahead_s, self._rtt_s, self._measured_at = None, math.inf, -math.inf

    def measure(self, before: float, after: float, store: float) -> None:
        """The store's clock showed `store` between these two times."""
        ahead_s, rtt_s = store - (before + after) / 2, after - before
        stepped = self._ahead_s is not None and abs(ahead_s - self._ahead_s) > (rtt_s + self._rtt_s) / 2 + STEP_S
        if stepped or rtt_s <= self._rtt_s or after - self._measured_at > KEEP_S:
            self._ahead_s, self._rtt_s, self._measured_at = ahead_s, rtt_s, after

    def local(self, store: float, now: float) -> float:
        """The local time at which the store's clock showed this time, at most `now`; `now` without a measurement."""
        return now if self._ahead_s is None else min(now, store - self._ahead_s)

    def store(self, now: float) -> float | None:
        """The time of the store's clock; None without a measurement."""
        return None if self._ahead_s is None else now + self._ahead_s

    def __repr__(self) -> str:
        return f"<StoreClock {self._ahead_s} s ahead, +-{self._rtt_s / 2} s>"


def plausible(time: float, now: float) -> float:
    """A converted time, limited to its bounds; `now` if it is not finite."""
    return min(now, max(time, now - MAX_PAST_S)) if math.isfinite(time) else now
