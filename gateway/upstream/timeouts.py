"""Timeouts of a call to a replica."""

from __future__ import annotations

import math
from typing import Final

from gateway.config.schema import TimeoutConfig

CONNECT_S: Final = 2.0  # to open a connection: TCP repeats a lost packet after one second; after that another replica is faster


class UpstreamTimeouts:
    """first_byte_s: request to first byte of the body; idle_s: silence after it; total_s: whole answer, None: no limit;
    soonest_s: the least of these three. Not to be changed.
    """

    __slots__ = ("connect_s", "first_byte_s", "idle_s", "soonest_s", "total_s")

    def __init__(self, connect_s: float, first_byte_s: float, idle_s: float, total_s: float | None = None) -> None:
        self.connect_s = connect_s
        self.first_byte_s = first_byte_s
        self.idle_s = idle_s
        self.total_s = total_s
        self.soonest_s = min(first_byte_s, idle_s, math.inf if total_s is None else total_s)


def limits_of(timeouts: TimeoutConfig) -> UpstreamTimeouts:
    return UpstreamTimeouts(CONNECT_S, timeouts.first_byte_s, timeouts.idle_s, timeouts.total_s or None)
