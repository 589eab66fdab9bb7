"""The other gateways, according to their envelopes: which are alive, and whether messages of them were missed. No I/O.

A gateway is alive until its goodbye, or until DEAD_S without entries. Its envelopes are numbered: a gap means that some were
lost (by us or by the store); a repeated one is ignored. Its routers get numbers here that are unique in the life of this
process.

Bounds: MAX_GATEWAYS alive, and as many silent ones; MAX_SOURCES routers of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from gateway.features.sharing.messages import ALL

DEAD_S: Final = 5.0  # five heartbeats
ASK_S: Final = 1.0  # between two questions for missed events, because an answer is expensive
MAX_GATEWAYS: Final = 1024
MAX_SOURCES: Final = 256
FIRST_SOURCE: Final = 1 << 31  # our routers have lower numbers


@dataclass(slots=True)
class PeerGateway:
    """Another gateway. seq: of its last envelope. since, seen: times of its first and its last envelope. sources: its router
    numbers -> their numbers here.

    missed_s: the missed events are of the last missed_s seconds before `missed_at`; None: nothing is to be asked for. asked_at:
    time of the last question.
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
        """The seconds to ask for now. None: nothing is missed, or it was asked within ASK_S."""
        if self.missed_s is None or now - self.asked_at < ASK_S:
            return None
        since_s = self.missed_s + now - self.missed_at if self.missed_s else 0.0
        self.missed_s, self.asked_at = None, now
        return since_s


class PeerGateways:
    """The live and the silent gateways."""

    def __init__(self) -> None:
        self.alive: dict[str, PeerGateway] = {}
        self._silent: dict[str, PeerGateway] = {}  # silent gateways
        self._next = FIRST_SOURCE

    def receive(self, gateway: str, host: str, seq: int, now: float) -> tuple[PeerGateway, float | None] | None:
        """Registers an envelope. Returns its gateway, and the time since which events of it were missed: None: nothing was
        missed; `now`: only its open bookings. Returns None for a repeated envelope, or if there are too many gateways.
        """
        peer = self.alive.get(gateway)
        if peer is None:
            if len(self.alive) >= MAX_GATEWAYS:
                return None
            earlier = self._silent.pop(gateway, None)
            peer = self.alive[gateway] = PeerGateway(gateway, host, seq, now, now)
            if earlier is not None and seq > earlier.seq + 1:
                return peer, earlier.seen
            return peer, now if seq > 1 else None
        if seq <= peer.seq:
            return None
        missed = peer.seen if seq != peer.seq + 1 else None
        peer.seq, peer.seen, peer.host = seq, now, host
        return peer, missed

    def source(self, peer: PeerGateway, source: int) -> int | None:
        """The number here of one of its routers. None: it has too many."""
        number = peer.sources.get(source)
        if number is None and len(peer.sources) < MAX_SOURCES:
            self._next += 1
            number = peer.sources[source] = self._next
        return number

    def forget(self, peer: PeerGateway, source: int) -> list[int]:
        """Removes one of its routers (ALL: each), and returns their numbers here."""
        if source == ALL:
            numbers = list(peer.sources.values())
            peer.sources.clear()
            return numbers
        number = peer.sources.pop(source, None)
        return [] if number is None else [number]

    def leave(self, gateway: str, *, silent: bool) -> PeerGateway | None:
        """Removes a gateway. silent: it may return, so its last envelope is remembered."""
        peer = self.alive.pop(gateway, None)
        if peer is not None and silent:
            self._silent[gateway] = peer
            if len(self._silent) > MAX_GATEWAYS:
                del self._silent[next(iter(self._silent))]
        return peer

    def heard_since(self, then: float) -> set[str]:
        """The gateways with an envelope since then. O(gateways)."""
        return {gateway for gateway, peer in self.alive.items() if peer.seen > then}

    def silent(self, now: float) -> list[str]:
        """The gateways without an envelope for DEAD_S."""
        return [gateway for gateway, peer in self.alive.items() if now - peer.seen > DEAD_S]

    def __repr__(self) -> str:
        return f"<PeerGateways: {', '.join(f'{peer.host} ({name})' for name, peer in self.alive.items()) or 'none'}>"
