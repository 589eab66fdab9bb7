"""What a replica's own counts of cached tokens say about its cache, beyond the one prompt that they are about.

Sizes are weights of blocks, in the index's unit (thousandths of a token).

Every warm prefix that comes back is a measurement. Since its last use other blocks were used on the replica (`younger`: their
weight), and an LRU cache keeps the prefix if they weigh less than the cache holds. So a hit shows that the cache holds at
least as many, and a miss that it holds no more, which is how its capacity is learned where the engine does not advertise it.
An engine that turns out to hold more than we believed has more room than we gave it.

A miss that cannot be for want of room, because a prefix with as many younger blocks was there, or because the capacity is known
and we forget by it, is the sign of a lost cache. RESTART_MISSES of them, of different prompts, without one cached token in
between, mean a restart. Only misses count that were sent after the last purge, for the others were sent on the old belief; and
only on a replica that has reported a hit since then, for one that always reports zero does not count, or does not cache.

What one client reports may be wrong on purpose, or because its engine computes another prompt than the one we read: it must
not cost the others what they have there. So where several clients use a replica (within a TTL: what was used before is
forgotten anyway), two of them must have seen a restart, and nobody shrinks a learned capacity twice in a row. A client that
has a replica to itself is believed alone: it can only hurt itself, and nobody else would see a restart. However it is, one
observation halves a capacity at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

RESTART_MISSES: Final = 3
RESTART_CLIENTS: Final = 2
GROWTH: Final = 1.1  # a learned capacity that proved too small grows by this factor
MEASURE_S: Final = 60.0  # hits are measured that were idle for longer than all others of the last minute: it takes time to do


class Miss:
    """A prefix that was believed to be on a replica, and was not, or not whole.

    client: its client; prefix: the key of its last block; sent: when. younger: weight of the blocks of others that were used
    there since its last use, None if they are too many to count; believed: of all blocks that the replica was believed to hold.
    nothing: not even a part was there.
    """

    __slots__ = ("believed", "client", "nothing", "prefix", "sent", "younger")

    def __init__(self, client: int, prefix: bytes, sent: float, younger: int | None, believed: int, nothing: bool) -> None:
        self.client = client
        self.prefix = prefix
        self.sent = sent
        self.younger = younger
        self.believed = believed
        self.nothing = nothing


@dataclass(slots=True)
class Evidence:
    """One replica's. Times in seconds."""

    learns_capacity: bool
    capacity: int | None = None  # the learned one
    purged_at: float = float("-inf")
    hits: bool = False  # has it reported any since then?
    held: int = 0  # it is known to have held as much
    # Prefixes that missed in a row, not for want of room: RESTART_MISSES at most.
    _lost: set[bytes] = field(default_factory=set)
    _losers: set[int] = field(default_factory=set)  # their clients: RESTART_CLIENTS at most
    _client: int | None = None  # the last one
    _others_at: float = float("-inf")  # when a request came from another client than the one before it
    _shrunk_by: int | None = None
    _longest_idle_s: float = 0.0
    _minute: float = float("-inf")

    def came(self, client: int, now: float) -> None:
        """A request of this client was answered."""
        if client != self._client:
            if self._client is not None:
                self._others_at = now
            self._client = client

    def alone(self, now: float, window_s: float) -> bool:
        """Whether all requests of the last window_s came from one client."""
        return now - self._others_at > window_s

    def purged(self, now: float) -> None:
        """The cache is empty, and every count that is still to come of an older request is void."""
        self.purged_at = now
        self.hit()
        self.hits = False

    def hit(self) -> None:
        """A warm prefix was there."""
        self.hits = True
        if self._lost:
            self._lost.clear()
            self._losers.clear()

    def worth_measuring(self, idle_s: float, now: float) -> bool:
        """Whether a hit on a prefix that nobody used for idle_s is likely to show more than the others of late."""
        if not self.learns_capacity:
            return False
        if now - self._minute > MEASURE_S:
            self._minute, self._longest_idle_s = now, 0.0
        if idle_s <= self._longest_idle_s:
            return False
        self._longest_idle_s = idle_s
        return True

    def kept(self, younger: int | None) -> None:
        """A prefix was there although blocks of this weight are younger (None: too many to count)."""
        if younger is not None:
            self.held = max(self.held, younger)

    def lost(self, miss: Miss, alone: bool) -> bool:
        """Take a miss in. alone: its client has the replica to itself. True if it makes a restart."""
        if miss.sent <= self.purged_at:
            return False
        if not miss.nothing:
            self.hit()  # of a part
        if self.learns_capacity and (miss.younger is None or miss.younger > self.held):
            if miss.younger is not None and (alone or miss.client != self._shrunk_by):
                self._shrink(miss.younger, miss.believed)
                self._shrunk_by = miss.client
            return False
        if miss.nothing and len(self._lost) < RESTART_MISSES:
            self._lost.add(miss.prefix)
        if miss.nothing and len(self._losers) < RESTART_CLIENTS:
            self._losers.add(miss.client)
        clients = 1 if alone else RESTART_CLIENTS
        return self.hits and len(self._lost) >= RESTART_MISSES and len(self._losers) >= clients

    def _shrink(self, younger: int, believed: int) -> None:
        """The cache holds no more than the younger blocks; but one observation halves the old value at most."""
        if self.capacity is None:
            self.capacity = max(younger, believed // 2)
        elif younger < self.capacity:
            self.capacity = max(younger, self.capacity // 2)

    def held_more(self, believed: int, block: int) -> None:
        """The engine held more of a prompt than we believed, and the capacity was the limit if no further block would have fit.

        believed: weight of all that it was believed to hold; block: of a block of the prompt.
        """
        if self.capacity is not None and believed + block > self.capacity:
            self.capacity = int(self.capacity * GROWTH) + block
