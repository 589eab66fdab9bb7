"""Timeouts of a call to a replica."""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.config.schema import TimeoutConfig

CONNECT_S: Final = 2.0  # to open a connection: TCP repeats a lost packet after one second; after that another replica is faster


class UpstreamTimeouts(NamedTuple):
    """Seconds. first_byte: request to first byte of the body; idle: silence after it; total: whole answer; None: no limit."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float | None = None


def limits_of(timeouts: TimeoutConfig) -> UpstreamTimeouts:
    return UpstreamTimeouts(CONNECT_S, timeouts.first_byte_s, timeouts.idle_s, timeouts.total_s or None)
