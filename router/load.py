"""What is running where: leases, and the speed of each replica.

A `Lease` is one request booked on a replica. It is open from `Ledger.open` to its one `close`; in between it may `move` to
another replica (failover) and see its `first_token`. Until the first token its uncached prompt tokens are booked prefill work,
after it the lease counts as a decoding sequence. Every event is idempotent and ignored once the lease is closed, so that no
order of events can make a count wrong; counts never need a floor at zero.

An engine serves prompts about first come, first served. So the first of a replica's waiting leases is taken to be in prefill
since its turn began: at its booking, or when the turn before it ended if that came later. Two things follow.
- What is left of the booked work shrinks while that prefill runs (`remaining_tokens`). A prompt of 100,000 tokens that is
  nearly through must not look like one that has just begun.
- (tokens computed) / (first token - begin of the turn) measures the replica's speed also under load. The lease keeps that
  time; the rate learns when the answer is over and the engine has said how many tokens it really had to compute, for a wrong
  guess about its cache would be taken for a change of its speed. Sums that forget with a half-life keep small prompts from
  drowning large ones.

A plain answer shows no first token: its lease is `silent`. It is taken to be through its prefill when its share of the work
must be done (`settle`); else a long answer would look like a long queue until its very end. It teaches nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

DEFAULT_PREFILL_RATE = 8000.0  # tokens per second, believed until a replica has shown its own
RATE_PRIOR_TOKENS = 2000.0  # how much evidence that belief is worth
RATE_HALF_LIFE_TOKENS = 50_000.0  # evidence halves after so many further tokens
ARRIVAL_WINDOW_S = 60.0  # arrivals are averaged over about so long


@dataclass(slots=True)
class ReplicaLoad:
    """One replica's open leases, in three counts, and its learned speed."""

    inflight: int = 0  # open leases
    decoding: int = 0  # of these, past their first token
    booked_tokens: int = 0  # uncached prompt tokens of the others
    waiting: OrderedDict[Lease, None] = field(default_factory=OrderedDict)  # the others, in order of booking
    turn_ended: float = float("-inf")
    arrivals: float = 0.0  # bookings, each fading by e in ARRIVAL_WINDOW_S
    arrived: float = float("-inf")  # the last one
    rate_tokens: float = RATE_PRIOR_TOKENS
    rate_seconds: float = RATE_PRIOR_TOKENS / DEFAULT_PREFILL_RATE

    def settle(self, now: float) -> None:
        """Let silent leases at the head of the queue decode whose prefill must be over by now. O(1) amortised."""
        while (first := next(iter(self.waiting), None)) and first.silent:
            ends = max(first.since, self.turn_ended) + first.uncached_tokens / self.prefill_rate
            if ends > now:
                return
            first.prefilled(ends)

    def remaining_tokens(self, now: float) -> int:
        """Booked prefill work less what the running prefill must have done of its own. O(1)."""
        first = next(iter(self.waiting), None)
        if first is None:
            return 0
        done = max(0.0, now - max(first.since, self.turn_ended)) * self.prefill_rate
        return self.booked_tokens - min(first.uncached_tokens, int(done))

    def arrival_rate(self, now: float) -> float:
        """Bookings per second, of late."""
        return self.arrivals * math.exp(-max(0.0, now - self.arrived) / ARRIVAL_WINDOW_S) / ARRIVAL_WINDOW_S

    def count_arrival(self, now: float) -> None:
        self.arrivals = self.arrival_rate(now) * ARRIVAL_WINDOW_S + 1
        self.arrived = max(self.arrived, now)

    @property
    def prefill_rate(self) -> float:
        """Uncached prompt tokens per second; positive."""
        return self.rate_tokens / self.rate_seconds

    def learn(self, tokens: int, seconds: float) -> None:
        """Take one prefill (uncached tokens, service time) into the rate."""
        if tokens <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (tokens / RATE_HALF_LIFE_TOKENS)
        self.rate_tokens = self.rate_tokens * keep + tokens
        self.rate_seconds = self.rate_seconds * keep + seconds


@dataclass(slots=True, eq=False)
class Lease:
    """One request booked on a replica. Made by `Ledger.open`; `close` it exactly once, in a `finally`."""

    ledger: Ledger = field(repr=False)
    replica: str
    uncached_tokens: int
    since: float  # when it was booked on this replica
    silent: bool = False  # its answer will show no first token
    decoding: bool = False
    prefill_s: float | None = None  # what the prefill took, once the first token is there
    closed: bool = False

    def first_token(self, now: float) -> None:
        """The prompt is prefilled: its tokens are no longer booked."""
        if self.closed or self.decoding:
            return
        self.prefill_s = now - max(self.since, self.ledger.of(self.replica).turn_ended)
        self.prefilled(now)

    def prefilled(self, now: float) -> None:
        """The prefill is over, by what was seen or by what must be."""
        load = self.ledger.of(self.replica)
        self.decoding = True
        load.decoding += 1
        load.booked_tokens -= self.uncached_tokens
        del load.waiting[self]
        load.turn_ended = max(load.turn_ended, now)

    def move(self, replica: str, uncached_tokens: int, now: float) -> None:
        """Book on another replica instead (the first one failed). Nothing if closed."""
        if self.closed:
            return
        self._leave(now)
        self.replica, self.uncached_tokens, self.since = replica, uncached_tokens, now
        self.decoding, self.prefill_s = False, None
        self._enter()

    def close(self, now: float) -> bool:
        """Give the booking back. True the first time, False (and nothing happens) after that."""
        if self.closed:
            return False
        self._leave(now)
        self.closed = True
        return True

    def _enter(self) -> None:
        load = self.ledger._loads.setdefault(self.replica, ReplicaLoad())
        load.inflight += 1
        load.count_arrival(self.since)
        load.booked_tokens += self.uncached_tokens
        load.waiting[self] = None

    def _leave(self, now: float) -> None:
        load = self.ledger.of(self.replica)
        load.inflight -= 1
        if self.decoding:
            load.decoding -= 1
            return
        load.booked_tokens -= self.uncached_tokens
        if next(iter(load.waiting)) is self:
            load.turn_ended = max(load.turn_ended, now)  # its turn is over, if with nothing to show
        del load.waiting[self]


class Ledger:
    """All open leases, by replica. Every operation is O(1)."""

    def __init__(self) -> None:
        self._loads: dict[str, ReplicaLoad] = {}

    def of(self, replica: str) -> ReplicaLoad:
        """A replica's load; that of a stranger is empty."""
        return self._loads.get(replica) or ReplicaLoad()

    def open(self, replica: str, uncached_tokens: int, now: float, *, silent: bool = False) -> Lease:
        lease = Lease(self, replica, uncached_tokens, now, silent)
        lease._enter()
        return lease

    def remove(self, replica: str) -> None:
        """Forget an idle replica's entry; a busy one stays, its leases still have to come home."""
        load = self._loads.get(replica)
        if load is not None and not load.inflight:
            del self._loads[replica]

    @property
    def open_leases(self) -> int:
        return sum(load.inflight for load in self._loads.values())

    def check(self) -> None:
        """Assert that no count can be wrong on its face; tests compare with the leases they hold."""
        for load in self._loads.values():
            assert 0 <= load.decoding <= load.inflight
            assert load.booked_tokens >= 0
            assert load.booked_tokens == sum(lease.uncached_tokens for lease in load.waiting)
            assert len(load.waiting) == load.inflight - load.decoding
            assert load.prefill_rate > 0

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {load.inflight} ({load.booked_tokens} tokens)" for name, load in self._loads.items())
        return f"<Ledger {rows}>"
