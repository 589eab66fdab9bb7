"""Infers restarts and the cache size of a replica from its reported cached tokens.

Sizes are weights of blocks, in the index's unit (thousandths of a token).

Every returning warm prefix is a measurement. Since its last use other blocks were used on the replica (`younger`: their
weight), and an LRU cache keeps the prefix if they weigh less than its capacity. So a hit is a lower bound of the capacity, and
a miss an upper bound: the capacity is learned from these if the engine does not advertise it. If the engine holds more than
predicted, the learned capacity grows.

A miss that a full cache cannot explain (a prefix with as many younger blocks was cached, or the capacity is known and bounds
the index) indicates a lost cache. RESTART_MISSES such misses of different prompts, without a cached token in between, mean a
restart. Only requests sent after the last purge count, because earlier ones were sent on old predictions; and only on a replica
that has reported a hit since then, because a replica that always reports zero does not count, or does not cache.

The counts of one client may be wrong on purpose, or because its engine renders another prompt than the gateway: they must not
purge the entries of other clients. So if several clients use a replica (within a TTL: older entries are expired anyway), a
restart needs evidence from two of them, and no client lowers a learned capacity twice in a row. The evidence of a single client
suffices: it can only hurt itself, and no other client would notice a restart. Restored entries, too, may be of several clients.
In any case, one observation halves a capacity at most.

State restored from a snapshot is on probation until the first report confirms it: the replica may have restarted meanwhile, and
then nothing of it is true. So one such miss suffices, of any client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

RESTART_MISSES: Final = 3
RESTART_CLIENTS: Final = 2
GROWTH: Final = 1.1  # a learned capacity that proved too small grows by this factor
MEASURE_S: Final = 60.0  # per interval only hits with the longest idle time so far are measured, because that is expensive


class Miss:
    """A prefix that was predicted to be cached on a replica, and was not, or only partly.

    client: its client. prefix: the key of its last block. sent: time of the request. younger: weight of other blocks used there
    since its last use, None if they are too many to count. believed: weight of all blocks that the replica was believed to
    hold. nothing: no block of it was cached.
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
    """Evidence about one replica. Times in seconds."""

    learns_capacity: bool
    capacity: int | None = None  # the learned one
    purged_at: float = float("-inf")
    hits: bool = False  # hits were reported since then
    reports: bool | None = None  # True: it has reported cached tokens; False: only counts without them; None: no counts
    on_probation: bool = False  # its state is of a snapshot, and no cached prefix has confirmed it yet
    inferred_at: float = float("-inf")  # the last loss that was inferred from misses, and not contradicted
    held: int = 0  # maximum weight that it has provably held
    # Prefixes of consecutive misses that a full cache cannot explain: RESTART_MISSES at most.
    _lost: set[bytes] = field(default_factory=set)
    _losers: set[int] = field(default_factory=set)  # their clients: RESTART_CLIENTS at most
    _client: int | None = None  # of the last request
    _others_at: float = float("-inf")  # time of the last request from another client than its predecessor
    _shrunk_by: int | None = None
    _longest_idle_s: float = 0.0
    _minute: float = float("-inf")

    def answered(self, client: int, now: float, *, reports: bool | None) -> None:
        """Record an answered request of this client. reports: its count has cached tokens; None: there is no count."""
        if not self.reports and reports is not None:
            self.reports = reports
        if client != self._client:
            if self._client is not None:
                self._others_at = now
            self._client = client

    def restored(self, now: float, *, hits: bool) -> None:
        """A snapshot was restored, with entries of any number of clients. hits: of its replica."""
        self.on_probation = not self.hits
        self.hits = self.hits or hits
        self._others_at = max(self._others_at, now)

    def single_client(self, now: float, window_s: float) -> bool:
        """True if all requests of the last window_s came from one client."""
        return now - self._others_at > window_s

    def purged(self, now: float) -> None:
        """The replica's cache was purged: counts of older requests are void."""
        self.purged_at = now
        self.hit()
        self.hits = False

    def was_inferred(self, sent: float, window_s: float) -> bool:
        """True once if a loss was inferred within window_s before a request of this time: its hit contradicts the loss."""
        inferred, self.inferred_at = self.inferred_at, float("-inf") if sent > self.inferred_at else self.inferred_at
        return 0 < sent - inferred < window_s

    def hit(self) -> None:
        """A warm prefix was cached."""
        self.hits = True
        self.on_probation = False
        if self._lost:
            self._lost.clear()
            self._losers.clear()

    def worth_measuring(self, idle_s: float, now: float) -> bool:
        """True if a hit on a prefix that was idle for idle_s probably shows more than other recent hits."""
        if not self.learns_capacity:
            return False
        if now - self._minute > MEASURE_S:
            self._minute, self._longest_idle_s = now, 0.0
        if idle_s <= self._longest_idle_s:
            return False
        self._longest_idle_s = idle_s
        return True

    def kept(self, younger: int | None) -> None:
        """A prefix was cached although blocks of this weight are younger (None: too many to count)."""
        if younger is not None:
            self.held = max(self.held, younger)

    def lost(self, miss: Miss, alone: bool) -> bool:
        """Record a miss. alone: its client is the replica's only one. True if a restart is inferred."""
        if miss.sent <= self.purged_at:
            return False
        if not miss.nothing:
            self.hit()  # a part was cached
        elif self.on_probation:
            return self.hits
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
        """Lower the capacity to the weight of the younger blocks, but at most by half."""
        if self.capacity is None:
            self.capacity = max(younger, believed // 2)
        elif younger < self.capacity:
            self.capacity = max(younger, self.capacity // 2)

    def held_more(self, believed: int, block: int) -> None:
        """The engine held more of a prompt than predicted: grow the capacity if it was the limit.

        believed: weight of all blocks that it was believed to hold. block: weight of a block of the prompt.
        """
        if self.capacity is not None and believed + block > self.capacity:
            self.capacity = int(self.capacity * GROWTH) + block
