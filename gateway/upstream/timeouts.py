"""How long a call to a replica may take."""

from __future__ import annotations

from typing import NamedTuple

from gateway.config.schema import TimeoutConfig


class Limits(NamedTuple):
    """Seconds. first_byte: from the request to the body's first byte; idle: silence after it; total: of the whole answer."""

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float | None = None


def limits_of(timeouts: TimeoutConfig) -> Limits:
    return Limits(timeouts.connect_s, timeouts.first_byte_s, timeouts.idle_s, timeouts.total_s or None)
