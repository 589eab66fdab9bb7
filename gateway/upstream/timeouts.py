"""Timeouts of a call to a replica."""

from __future__ import annotations

import math
from typing import Final

from gateway.config.schema import TimeoutConfig

CONNECT_S: Final = 2.0  # to open a connection: TCP repeats a lost packet after one second; after that another replica is faster
FIRST_BYTE, IDLE, TOTAL = "timeouts.first_byte_s", "timeouts.idle_s", "timeouts.total_s"  # the keys


class UpstreamTimeouts:
    """first_byte_s: silence before the first token, or before the body of any other answer; idle_s: silence after it.
    total_s: the whole request, None: no limit; left_s: the rest of it for this call. soonest_s: the least of these. named: they
    are the configured ones, which errors name. Not to be changed.
    """

    __slots__ = ("connect_s", "first_byte_s", "idle_s", "left_s", "named", "soonest_s", "total_s")

    def __init__(
        self, connect_s: float, first_byte_s: float, idle_s: float, total_s: float | None = None, *, named: bool = False
    ) -> None:
        self.connect_s = connect_s
        self.first_byte_s = first_byte_s
        self.idle_s = idle_s
        self.total_s = total_s
        self.left_s = math.inf if total_s is None else total_s
        self.named = named
        self.soonest_s = min(first_byte_s, idle_s, self.left_s)

    def after(self, spent_s: float) -> UpstreamTimeouts:
        """The timeouts of a further call for a request that has taken this long."""
        if self.total_s is None:
            return self
        further = UpstreamTimeouts(self.connect_s, self.first_byte_s, self.idle_s, self.total_s, named=self.named)
        further.left_s = max(0.0, self.total_s - spent_s)
        further.soonest_s = min(self.soonest_s, further.left_s)
        return further


def limits_of(timeouts: TimeoutConfig) -> UpstreamTimeouts:
    return UpstreamTimeouts(CONNECT_S, timeouts.first_byte_s, timeouts.idle_s, timeouts.total_s or None, named=True)
