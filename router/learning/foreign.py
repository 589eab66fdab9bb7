"""Load of others on a replica: requests in its engine's reports beyond the gateway's own.

A batch job, or another gateway that does not share its bookings, sends to the same engine. Its requests are in no ledger, but
the engine counts them: foreign = running + waiting - ours. What waits there computes before a request that comes now; what runs
decodes beside it.

A report is exact when it is made. Then the engine computes what waits, beside our own requests, and others come. So the last
figure is used up at the replica's prefill rate, less our own work, and the mean of the recent reports grows in its place
within FADE_S. Without new reports all of it fades, with STALE_S. The prefill of a foreign request is unknown: it is learned for
each replica from the waits of own requests that had no own one before them. A time that includes foreign work shows nothing
about the replica's rate, and is not learned as such.

What an engine reports changes the price of its own replica only: too much, and it gets fewer requests; too little, and it is
priced as if it reported nothing. Once it has shown requests of others, it is to be asked more often for WATCH_S.
"""

from __future__ import annotations

import math
from typing import Final

FADE_S: Final = 4.0
MEAN_S: Final = 30.0  # time constant of the mean of reports
STALE_S: Final = 10.0
WATCH_S: Final = 30.0
BUSY_S: Final = 120.0  # time constant of the share of busy time
TOKENS: Final = 2000.0  # uncached prompt tokens of a foreign request, until learned
LEAST_TOKENS: Final = 16.0
WEIGHT: Final = 8.0  # requests, of which the learned tokens are the mean
MOST_TOKENS: Final = 1e6  # that are believed to wait
FEW: Final = 0.25  # fewer requests are none
MOST_RUNNING: Final = 1024.0


class ForeignLoad:
    """The load of others on one replica (see the module). All operations O(1)."""

    __slots__ = (
        "_at",
        "_busy",
        "_mean_running",
        "_mean_waiting",
        "_own",
        "_running",
        "_seen",
        "_seen_at",
        "_tokens",
        "_waiting",
    )

    def __init__(self) -> None:
        self._at = self._seen_at = -math.inf
        self._running = self._waiting = 0.0
        self._mean_running = self._mean_waiting = self._busy = 0.0
        self._tokens = TOKENS
        self._seen = 1.0
        self._own = 0.0  # tokens of ours that were computed since the last report

    def report(self, running: int, waiting: int, own: int, now: float) -> None:
        """One report of the engine. own: most sequences of ours meanwhile, of all gateways that share bookings."""
        whole = running + waiting
        part = max(0, whole - own) / whole if whole else 0.0
        self._running, self._waiting = min(MOST_RUNNING, running * part), waiting * part
        keep = math.exp(-max(0.0, now - self._at) / MEAN_S)
        self._mean_running += (self._running - self._mean_running) * (1 - keep)
        self._mean_waiting += (self._waiting - self._mean_waiting) * (1 - keep)
        keep = math.exp(-max(0.0, now - self._at) / BUSY_S) if self._at > -math.inf else 1.0
        self._busy += ((self._waiting >= FEW) - self._busy) * (1 - keep)
        self._at, self._own = now, 0.0
        if part:
            self._seen_at = now

    def watched(self, now: float) -> bool:
        """True if a report within WATCH_S has shown requests of others."""
        return now - self._seen_at < WATCH_S

    def computed(self, tokens: int) -> None:
        """The engine has computed so many tokens of ours."""
        self._own += tokens

    def waiting(self, now: float, rate: float) -> float:
        """Expected requests of others that wait for their prefill. rate: of the engine, in tokens per second."""
        age = max(0.0, now - self._at)
        used = max(0.0, age * rate - self._own) / self._tokens
        fresh = math.exp(-age / STALE_S)
        found = fresh * max(0.0, self._waiting - used) + (fresh - math.exp(-age / FADE_S)) * self._mean_waiting
        return found if found >= FEW else 0.0

    def running(self, now: float) -> float:
        """Expected requests of others in the batch."""
        age = max(0.0, now - self._at)
        fresh, share = math.exp(-age / STALE_S), math.exp(-age / FADE_S)
        return share * self._running + (fresh - share) * self._mean_running

    def busy(self, now: float) -> float:
        """The share of the time in which prompts of others were waiting lately."""
        return self._busy * math.exp(-max(0.0, now - self._at) / BUSY_S)

    def tokens(self, now: float, rate: float) -> int:
        """Prompt tokens of others that are computed before a request that comes now."""
        return int(min(MOST_TOKENS, self.waiting(now, rate) * self._tokens))

    def learn(self, waiting: float, tokens: float) -> None:
        """An own request has waited as long as so many tokens take, behind so many foreign requests."""
        share = 1.0 / min(WEIGHT, self._seen)
        self._seen += 1.0
        if waiting <= 0:
            return
        each = min(max(tokens / waiting, LEAST_TOKENS), MOST_TOKENS)
        self._tokens += (each - self._tokens) * share

    def __repr__(self) -> str:
        return f"<ForeignLoad {self._waiting:.3g} waiting, {self._running:.3g} running, of {self._tokens:.4g} tokens>"
