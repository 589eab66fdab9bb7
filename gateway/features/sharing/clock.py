"""Translates the times of another machine's events into this machine's clock, by way of the store's clock.

The store dates each entry. How its clock differs from ours is measured with each entry of our own: it was dated between the
moment that we sent it and the moment that we had the answer; the measurement with the shortest time between the two is the
best, until it is too old. So the wall clocks of the gateways play no part, and may be wrong by any amount; the store's clock
may be wrong, too, as long as it runs on.

An event cannot be later than now, nor older than MAX_PAST_S; what seems to be, is so by a clock that was set.
"""

from __future__ import annotations

import math
from typing import Final

KEEP_S: Final = 60.0  # a measurement
STEP_S: Final = 0.1  # a further difference is no inaccuracy: the store's clock was set, or it is another store
MAX_PAST_S: Final = 86_400.0


class StoreClock:
    """See the top of this file. Seconds; `now` is this machine's monotonic clock."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None  # the store's clock less ours
        self._rtt_s = math.inf
        self._measured_at = -math.inf

    def forget(self) -> None:
        """It may be another store from now on."""
        self._ahead_s, self._rtt_s, self._measured_at = None, math.inf, -math.inf

    def measure(self, before: float, after: float, store: float) -> None:
        """Its clock showed `store` between these two moments."""
        ahead_s, rtt_s = store - (before + after) / 2, after - before
        stepped = self._ahead_s is not None and abs(ahead_s - self._ahead_s) > (rtt_s + self._rtt_s) / 2 + STEP_S
        if stepped or rtt_s <= self._rtt_s or after - self._measured_at > KEEP_S:
            self._ahead_s, self._rtt_s, self._measured_at = ahead_s, rtt_s, after

    def local(self, store: float, now: float) -> float:
        """The time here when the store's clock showed this; `now` at most, and if nothing was measured."""
        return now if self._ahead_s is None else min(now, store - self._ahead_s)

    def store(self, now: float) -> float | None:
        """The time of the store's clock; None if nothing was measured."""
        return None if self._ahead_s is None else now + self._ahead_s

    def __repr__(self) -> str:
        return f"<StoreClock {self._ahead_s} s ahead, +-{self._rtt_s / 2} s>"


def plausible(time: float, now: float) -> float:
    """A translated time, within its bounds; now if it is no number."""
    return min(now, max(time, now - MAX_PAST_S)) if math.isfinite(time) else now
