"""The other gateways, as their envelopes show them: who is alive, and whether something of them was missed. No I/O.

A gateway is alive until it says goodbye, or nothing came from it for DEAD_S. Its envelopes are counted: a gap means that
something was lost (by us, or by the store), one that comes twice is passed over. Its routers get numbers here that no other
router has or had in this process.

Bounds: MAX_GATEWAYS alive, and as many that fell silent; MAX_SOURCES routers of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.features.sharing.messages import ALL

DEAD_S: Final = 5.0  # five heartbeats
ASK_S: Final = 1.0  # between two times that it is asked for what was missed: an answer is work
MAX_GATEWAYS: Final = 1024
MAX_SOURCES: Final = 256
FIRST_SOURCE: Final = 1 << 31  # our own routers have lower numbers


@dataclass(slots=True)
class PeerGateway:
    """seq: of its last envelope. since, seen: when its first and its last one was read. sources: its routers' numbers here, by
    its own.

    missed_s: what was missed of it was used within the last missed_s seconds, from `missed_at` on; None: nothing is to be asked
    for. asked_at: when it was asked last.
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
        """Entries of its last since_s seconds were missed; 0: only its open bookings."""
        earlier = 0.0 if not self.missed_s else self.missed_s + now - self.missed_at
        self.missed_s, self.missed_at = max(since_s, earlier), now

    def ask(self, now: float) -> float | None:
        """The seconds that it should be asked for now; None: nothing is missed, or it was asked within ASK_S."""
        if self.missed_s is None or now - self.asked_at < ASK_S:
            return None
        since_s = self.missed_s + now - self.missed_at if self.missed_s else 0.0
        self.missed_s, self.asked_at = None, now
        return since_s


class PeerGateways:
    """See the top of this file."""

    def __init__(self) -> None:
        self.alive: dict[str, PeerGateway] = {}
        self._former: dict[str, PeerGateway] = {}  # that were silent
        self._next = FIRST_SOURCE

    def receive(self, gateway: str, host: str, seq: int, now: float) -> tuple[PeerGateway, float | None] | None:
        """An envelope came. (its gateway; since when something of it was missed, `now` if all that was missed is what it has
        open, None if nothing was); None: the envelope came before, or there are too many gateways.
        """
        other = self.alive.get(gateway)
        if other is None:
            if len(self.alive) >= MAX_GATEWAYS:
                return None
            former = self._former.pop(gateway, None)
            other = self.alive[gateway] = PeerGateway(gateway, host, seq, now, now)
            if former is not None and seq > former.seq + 1:
                return other, former.seen
            return other, now if seq > 1 else None
        if seq <= other.seq:
            return None
        missed = other.seen if seq != other.seq + 1 else None
        other.seq, other.seen, other.host = seq, now, host
        return other, missed

    def source(self, other: PeerGateway, source: int) -> int | None:
        """The number of one of its routers; None: it has too many."""
        number = other.sources.get(source)
        if number is None and len(other.sources) < MAX_SOURCES:
            self._next += 1
            number = other.sources[source] = self._next
        return number

    def forget(self, other: PeerGateway, source: int) -> list[int]:
        """One of its routers (ALL: each) is over. Returns their numbers here."""
        if source == ALL:
            numbers = list(other.sources.values())
            other.sources.clear()
            return numbers
        number = other.sources.pop(source, None)
        return [] if number is None else [number]

    def leave(self, gateway: str, *, silent: bool) -> PeerGateway | None:
        """It has ended, or nothing comes from it: then it may come back."""
        other = self.alive.pop(gateway, None)
        if other is not None and silent:
            self._former[gateway] = other
            if len(self._former) > MAX_GATEWAYS:
                del self._former[next(iter(self._former))]
        return other

    def heard_since(self, then: float) -> set[str]:
        """Gateways that are certainly alive. O(gateways)."""
        return {gateway for gateway, other in self.alive.items() if other.seen > then}

    def silent(self, now: float) -> list[str]:
        """Gateways that are dead by now."""
        return [gateway for gateway, other in self.alive.items() if now - other.seen > DEAD_S]

    def __repr__(self) -> str:
        return f"<PeerGateways: {', '.join(f'{other.host} ({name})' for name, other in self.alive.items()) or 'none'}>"
