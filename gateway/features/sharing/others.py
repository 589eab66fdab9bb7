"""Registry of the other gateways, from their envelopes: which are alive, and which have a gap. No I/O.

A gateway is alive until its goodbye, or until DEAD_S without an envelope. Its envelopes have numbers: a gap means that one was
lost (by us, or by the store); a repeated one is ignored. Each of its routers gets a number that is unique in this process.

Bounds: MAX_GATEWAYS that are alive, and as many silent ones; MAX_SOURCES routers of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.features.sharing.messages import ALL

DEAD_S: Final = 5.0  # five heartbeats
ASK_S: Final = 1.0  # between two resync requests to one gateway: an answer is work
MAX_GATEWAYS: Final = 1024
MAX_SOURCES: Final = 256
FIRST_SOURCE: Final = 1 << 31  # our own routers have lower numbers


@dataclass(slots=True)
class RemoteGateway:
    """Another gateway. seq: number of its last envelope. since, seen: when its first and last envelope was read. sources: our
    numbers of its routers, by its own.

    missed_s: length of the gap in seconds, at `missed_at`; None: there is no gap. asked_at: time of the last resync request.
    """

    gateway: str
    host: str
    seq: int
    since: float
    seen: float
    sources: dict[int, int] = field(default_factory=dict)
    missed_s: float | None = None
    missed_at: float = 0.0
    asked_at: float = -math.inf

    def miss(self, since_s: float, now: float) -> None:
        """Record a gap of the last since_s seconds; 0: only its open bookings are missing."""
        earlier = 0.0 if not self.missed_s else self.missed_s + now - self.missed_at
        self.missed_s, self.missed_at = max(since_s, earlier), now

    def ask(self, now: float) -> float | None:
        """The length of the gap, if a resync request is due; once within ASK_S."""
        if self.missed_s is None or now - self.asked_at < ASK_S:
            return None
        since_s = self.missed_s + now - self.missed_at if self.missed_s else 0.0
        self.missed_s, self.asked_at = None, now
        return since_s


class RemoteGateways:
    """See the top of this file."""

    def __init__(self) -> None:
        self.alive: dict[str, RemoteGateway] = {}
        self._former: dict[str, RemoteGateway] = {}  # silent gateways
        self._next = FIRST_SOURCE

    def receive(self, gateway: str, host: str, seq: int, now: float) -> tuple[RemoteGateway, float | None] | None:
        """Record an envelope. Returns (its gateway, begin of a gap: `now` if only the open bookings are missing, None without a
        gap); None: the envelope is a repetition, or there are too many gateways.
        """
        other = self.alive.get(gateway)
        if other is None:
            if len(self.alive) >= MAX_GATEWAYS:
                return None
            former = self._former.pop(gateway, None)
            other = self.alive[gateway] = RemoteGateway(gateway, host, seq, now, now)
            if former is not None and seq > former.seq + 1:
                return other, former.seen
            return other, now if seq > 1 else None
        if seq <= other.seq:
            return None
        missed = other.seen if seq != other.seq + 1 else None
        other.seq, other.seen, other.host = seq, now, host
        return other, missed

    def source(self, other: RemoteGateway, source: int) -> int | None:
        """Our number of one of its routers; None: it has too many."""
        number = other.sources.get(source)
        if number is None and len(other.sources) < MAX_SOURCES:
            self._next += 1
            number = other.sources[source] = self._next
        return number

    def forget(self, other: RemoteGateway, source: int) -> list[int]:
        """Remove one of its routers (ALL: each). Returns our numbers of them."""
        if source == ALL:
            numbers = list(other.sources.values())
            other.sources.clear()
            return numbers
        number = other.sources.pop(source, None)
        return [] if number is None else [number]

    def leave(self, gateway: str, *, silent: bool) -> RemoteGateway | None:
        """Remove a gateway that has ended, or is silent: a silent one may come back."""
        other = self.alive.pop(gateway, None)
        if other is not None and silent:
            self._former[gateway] = other
            if len(self._former) > MAX_GATEWAYS:
                del self._former[next(iter(self._former))]
        return other

    def heard_since(self, then: float) -> set[str]:
        """Gateways with an envelope since then. O(gateways)."""
        return {gateway for gateway, other in self.alive.items() if other.seen > then}

    def silent(self, now: float) -> list[str]:
        """Gateways without an envelope for DEAD_S."""
        return [gateway for gateway, other in self.alive.items() if now - other.seen > DEAD_S]

    def __repr__(self) -> str:
        return f"<RemoteGateways: {', '.join(f'{other.host} ({name})' for name, other in self.alive.items()) or 'none'}>"
