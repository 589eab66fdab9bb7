"""What a replica's own counts of cached tokens say about its cache, beyond the one prompt that they are about.

Every warm prefix that comes back is a measurement. Since its last use so many other blocks were used on the replica
(`younger`), and an LRU cache keeps it if that is less than the cache holds. So a hit shows that the cache holds at least as
much, and a miss that it holds no more, which is how its capacity is learned where the engine does not advertise it. One that
turns out to hold more than we believed has more room than we gave it.

A miss that cannot be for want of room, because a prefix with as many younger blocks was there, or because the capacity is known
and we forget by it, is the sign of a lost cache. RESTART_MISSES of them in a row without one cached token mean a restart. Only
those count that were sent after the last purge, for the others were sent on the old belief; and only on a replica that has
reported a hit since then, for one that always reports zero does not tell, or does not cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RESTART_MISSES: Final = 3
GROWTH: Final = 1.1  # a learned capacity that proved too small grows by this factor
MEASURE_S: Final = 60.0  # hits are measured that were idle for longer than all others of the last minute: it takes time to do


@dataclass(slots=True)
class Evidence:
    """One replica's. Times in seconds, sizes in blocks."""

    learns_capacity: bool
    capacity: int | None = None  # the learned one
    zero_hits: int = 0  # in a row, that cannot be for want of room
    purged_at: float = float("-inf")
    hits: bool = False  # has it reported any since then?
    held: int = 0  # it is known to have held so many
    _longest_idle_s: float = 0.0
    _minute: float = float("-inf")

    def purged(self, now: float) -> None:
        """The cache is empty, and every count that is still to come of an older request is void."""
        self.purged_at = now
        self.zero_hits, self.hits = 0, False

    def hit(self) -> None:
        """A warm prefix was there."""
        self.zero_hits, self.hits = 0, True

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

    def kept(self, younger: int) -> None:
        """A prefix was there although so many blocks are younger."""
        self.held = max(self.held, younger)

    def lost(self, younger: int, cached_nothing: bool, sent: float) -> bool:
        """A prefix, sent at `sent`, was not there, or not whole; so many blocks are younger. True if it makes a restart."""
        if sent <= self.purged_at:
            return False
        if not cached_nothing:
            self.hit()  # of a part
        if self.learns_capacity and younger > self.held:
            self.capacity = younger if self.capacity is None else min(self.capacity, younger)
            return False
        self.zero_hits += cached_nothing
        return self.hits and self.zero_hits >= RESTART_MISSES

    def held_more(self, believed: int) -> None:
        """The engine held more of a prompt than we believed. believed: of all; below the capacity, that was no limit."""
        if self.capacity is not None and believed >= self.capacity:
            self.capacity = int(self.capacity * GROWTH) + 1
