"""Learned prefill rates: one estimate for each pool, from which a replica departs with its own evidence.

The evidence of a replica is the sum of the tokens and of the seconds of its prefills. Its rate is their quotient after one
more prefill, of FULL_TOKENS at the pool's rate:

    rate = (tokens + FULL_TOKENS) / (seconds + FULL_TOKENS / rate of the pool)

The pool's rate is the median of its replicas' quotients, so that one replica with wrong times does not move it. Evidence halves
when the average replica of the pool has computed HALF_LIFE_TOKENS more, whether this one has or not: a replica that gets no
requests because it seems slow returns to the pool's rate, and is tried again.

Sums of tokens and seconds, and no regression: where the end of one prefill is seen late, the next one seems too short, and in
the sums the two errors cancel. The time of a short prompt is mostly overhead: it counts less than its tokens.
"""

from __future__ import annotations

import math
from typing import Final

from router.learning.conversations import ConversationWork

DEFAULT_RATE: Final = 8000.0  # tokens per second, until one is measured
HALF_LIFE_TOKENS: Final = 25_000.0
FULL_TOKENS: Final = 1000.0  # a shorter prefill counts less; with less evidence a replica has the rate of its pool
OUTLIER: Final = 4.0  # one prefill counts as at most this factor faster or slower than expected
# Logarithms of the factor between a replica and its pool. Up to ALIKE it is noise: the cheapest of equal replicas would be the
# one with the luckiest times, for ever. From DIFFERENT on it counts in full.
ALIKE: Final = math.log(1.2)
DIFFERENT: Final = math.log(1.5)
SPREAD: Final = math.log(16.0)
MEMBERS_PER_LEARN: Final = 4  # the pool's rate is computed anew after one prefill for each of so many replicas


class PrefillRate:
    """The rate of one replica. value: uncached prompt tokens per second, positive."""

    __slots__ = ("pool", "seconds", "tokens", "value")

    def __init__(self, pool: PoolRate) -> None:
        self.pool = pool
        self.value = pool.value
        self.tokens = 0.0
        self.seconds = 0.0

    @property
    def sums(self) -> tuple[float, float]:
        """The evidence: (tokens, seconds)."""
        return self.tokens, self.seconds

    def restore(self, sums: tuple[float, float]) -> None:
        """Replace the evidence by that of another router; both positive. Then the pool is to be refreshed, once for all."""
        self.tokens, self.seconds = sums

    def forget(self) -> None:
        """Drop the evidence: the rate is the pool's."""
        self.tokens = self.seconds = 0.0
        self.settle()

    def learn(self, tokens: int, seconds: float) -> None:
        """Add one prefill of `tokens` uncached tokens. O(log members) amortised."""
        if tokens <= 0 or seconds <= 0:
            return
        expected, share = tokens / self.value, min(1.0, tokens / FULL_TOKENS)
        if not expected / OUTLIER <= seconds <= expected * OUTLIER and self.pool.known:
            # One may be wrong; several of them show that the evidence before them is.
            keep = math.pow(0.5, share)
            self.tokens *= keep
            self.seconds *= keep
            seconds = min(max(seconds, expected / OUTLIER), expected * OUTLIER)
        self.tokens += tokens * share
        self.seconds += seconds * share
        self.settle()
        self.pool.learned(tokens)

    def settle(self) -> None:
        """Compute the value from the evidence and the pool's rate."""
        pool = self.pool.value
        if self.tokens < FULL_TOKENS:
            self.value = pool
            return
        rate = (self.tokens + FULL_TOKENS) / (self.seconds + FULL_TOKENS / pool)
        apart = math.log(rate / pool)
        if (size := abs(apart)) < DIFFERENT:
            apart *= max(0.0, (size - ALIKE) / (DIFFERENT - ALIKE))
        self.value = pool * math.exp(min(max(apart, -SPREAD), SPREAD))

    def __repr__(self) -> str:
        return f"<PrefillRate {self.value:.6g}>"


class PoolRate:
    """The rates of one pool. value: of a replica without evidence. known: the value is measured. conversation: the work of one
    of its conversations.
    """

    __slots__ = ("_learns", "_tokens", "conversation", "known", "members", "name", "value")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.value = DEFAULT_RATE
        self.known = False
        self.conversation = ConversationWork()
        self.members: dict[str, PrefillRate] = {}
        self._learns = 0
        self._tokens = 0.0

    def learned(self, tokens: int) -> None:
        """Count one prefill of a member."""
        self._learns += 1
        self._tokens += tokens
        if self._learns * MEMBERS_PER_LEARN >= len(self.members):
            self.refresh()

    def refresh(self) -> None:
        """Let the evidence of all members age, and compute the pool's rate and theirs. O(members log members)."""
        keep = math.pow(0.5, self._tokens / (HALF_LIFE_TOKENS * max(1, len(self.members))))
        self._learns, self._tokens = 0, 0.0
        measured = []
        for rate in self.members.values():
            rate.tokens *= keep
            rate.seconds *= keep
            if rate.tokens >= FULL_TOKENS:
                measured.append(rate.tokens / rate.seconds)
        if measured:
            measured.sort()
            middle = len(measured) // 2  # of an even number it is the mean of two
            self.value, self.known = (measured[middle] + measured[~middle]) / 2, True
        for rate in self.members.values():
            rate.settle()

    def __repr__(self) -> str:
        return f"<PoolRate {self.value:.6g} of {len(self.members)}>"


class PrefillRates:
    """The rates of all replicas, by name."""

    def __init__(self) -> None:
        self._pools: dict[str, PoolRate] = {}
        self._rates: dict[str, PrefillRate] = {}

    def add(self, name: str, pool: str) -> None:
        """A replica joined this pool; its evidence stays where it changes pools."""
        joined = self._pools.get(pool)
        if joined is None:
            joined = self._pools[pool] = PoolRate(pool)
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = PrefillRate(joined)
        elif rate.pool is not joined:
            self._leave(name, rate)
            rate.pool = joined
        joined.members[name] = rate
        rate.settle()

    def remove(self, name: str) -> None:
        rate = self._rates.pop(name, None)
        if rate is not None:
            self._leave(name, rate)

    def _leave(self, name: str, rate: PrefillRate) -> None:
        del rate.pool.members[name]
        if not rate.pool.members:
            del self._pools[rate.pool.name]

    def refresh(self) -> None:
        """Compute all rates anew. O(replicas log replicas)."""
        for pool in self._pools.values():
            pool.refresh()

    def of(self, name: str) -> PrefillRate:
        """The rate of a replica; that of an unknown one is the default, and is not kept."""
        return self._rates.get(name) or PrefillRate(PoolRate())

    def enter(self, name: str) -> PrefillRate:
        """The rate of a replica; an unknown one joins the pool without a name."""
        if name not in self._rates:
            self.add(name, "")
        return self._rates[name]
