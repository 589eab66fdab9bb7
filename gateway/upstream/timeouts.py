"""Timeouts of a call to a replica."""

from __future__ import annotations

from typing import NamedTuple

from gateway.config.schema import TimeoutConfig


class Limits(NamedTuple):
    """Seconds. first_byte: request to first byte of the body; idle: silence after it; total: whole answer; None: no limit."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float | None = None


def limits_of(timeouts: TimeoutConfig) -> Limits:
    return Limits(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s, timeouts.total_s or None)
