"""What requests tell about a replica's health, and what is done about it; `probe.py` asks for itself.

`Breaker`, one per replica, cuts off who fails:

    closed ── `failures` in a row, or too large a share of the last `window` ──► open ── back-off is over ──► half open
      ▲                                                                           ▲                             │
      │                                                                           └──── the probe failed ◄──────┤
      └──────────────────────────────────────────────────────── `needed` probes in a row succeeded ◄────────────┘

Half open, it lets one request through at a time, the probe. Each failed probe doubles the back-off; closing forgets it all.
`begin` returns an `Attempt`: it is judged once, and an attempt that is left without a verdict (its client went away) frees
the probe's slot, so that one `finally` with `abandoned` makes it safe. Only who began in the present state is heard: what was
sent before the breaker opened tells nothing new, or each of a hundred requests that die together would double the back-off.

`RetryBudget` keeps retries from adding to an overload: they are a share of the requests, with a small reserve. `jitter` is the
pause before one. `share` lets a replica that just came up begin with little.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

RETRY_BASE_S, RETRY_MOST_S = 0.025, 0.25
REST_MOST_S: Final = 60.0  # no replica sends itself away for longer
FIRST_SHARE: Final = 0.1

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
UNHEARD: Final = -1  # the era of attempts that nobody listens to


class RetryBudget:
    """At most ratio * requests + burst retries. All operations O(1)."""

    __slots__ = ("_burst", "_left", "_ratio")

    def __init__(self, ratio: float = 0.2, burst: float = 100) -> None:
        self._ratio = ratio
        self._burst = burst
        self._left = float(burst)

    def request(self) -> None:
        """A request came in (not a retry of one)."""
        left = self._left + self._ratio
        self._left = left if left < self._burst else self._burst

    def take(self) -> bool:
        """Whether one more retry is within the budget; if so, it is spent."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def __repr__(self) -> str:
        return f"<RetryBudget {self._left:.3g} of {self._burst:g}>"


def jitter(attempt: int, chance: Random, *, at_once: bool = False) -> float:
    """Seconds to pause before a retry; attempt: 1 for the first. at_once: that one need not wait (nobody was listening)."""
    if at_once and attempt == 1:
        return 0.0
    return chance.random() * min(RETRY_MOST_S, RETRY_BASE_S * 2.0 ** min(attempt - 1, 10))


def share(up_since: float, now: float, window_s: float) -> float:
    """What part of its due a replica gets that came up then: a tenth at first, all of it after window_s."""
    age_s = max(0.0, now - up_since)
    return 1.0 if age_s >= window_s else FIRST_SHARE + (1 - FIRST_SHARE) * age_s / window_s


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """failures: so many in a row open it; so does a failure when more than `failed_share` of the last `window` outcomes are
    failures, once there are `least` outcomes. needed: good probes in a row that close it. back_off_s: how long it stays open
    at first, most_s: after any number of failed probes; a random part of up to a quarter is taken off.
    """

    failures: int = 5
    failed_share: float = 0.5
    least: int = 20
    window: int = 64
    needed: int = 1
    back_off_s: float = 1.0
    most_s: float = 30.0


class Attempt:
    """One request on its way to a replica. Made by `Breaker.begin`; the first verdict counts."""

    __slots__ = ("_breaker", "_era")

    def __init__(self, breaker: Breaker, era: int) -> None:
        self._breaker: Breaker | None = breaker
        self._era = era

    def success(self) -> None:
        """The replica answers as it should; say so at the answer's first byte, for a probe that streams is long."""
        if breaker := self._heard():
            breaker._succeeded()

    def failure(self, now: float) -> None:
        if breaker := self._heard():
            breaker._failed(now)

    def abandoned(self) -> None:
        """It tells nothing about the replica."""
        if breaker := self._heard():
            breaker._probing = False

    def _heard(self) -> Breaker | None:
        """The breaker, if it listens: not to a second verdict, nor to one that began in another state."""
        breaker, self._breaker = self._breaker, None
        return breaker if breaker is not None and breaker._era == self._era else None

    def __repr__(self) -> str:
        return f"<Attempt {'judged' if self._breaker is None else 'under way'}>"


class Breaker:
    """See the top of this file. All operations O(1). retry_at: before then it is not chosen, be it open or resting."""

    __slots__ = ("_chance", "_era", "_good", "_opened", "_outcomes", "_probing", "_row", "_rules", "_seen", "retry_at")

    def __init__(self, chance: Random, rules: BreakerRules | None = None) -> None:
        self._chance = chance
        self._rules = rules or BreakerRules()
        self._era = 0  # how often it has opened
        self.retry_at = float("-inf")
        self._close()

    def state(self, now: float) -> str:
        if not self._opened:
            return CLOSED
        return OPEN if now < self.retry_at else HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Changes nothing."""
        return now >= self.retry_at and not self._probing

    def begin(self, now: float) -> Attempt:
        """A request is sent: half open it takes the probe's slot. One that is not allowed may be sent, but is not heard."""
        if not self._opened:
            return Attempt(self, self._era)
        if not self.allows(now):
            return Attempt(self, UNHEARD)
        self._probing = True
        return Attempt(self, self._era)

    def rest(self, until: float, now: float) -> None:
        """The replica asked to be left alone (Retry-After). That is no failure, and no promise for longer than a minute."""
        self.retry_at = max(self.retry_at, min(until, now + REST_MOST_S))

    def _open(self, now: float) -> None:
        back_off_s = min(self._rules.most_s, self._rules.back_off_s * 2.0 ** min(self._opened, 30))
        self.retry_at = max(self.retry_at, now + back_off_s * (0.75 + self._chance.random() / 4))
        self._opened += 1
        self._era += 1
        self._probing, self._good = False, 0

    def _close(self) -> None:
        self._opened = 0  # times in a row
        self._probing, self._good = False, 0  # half open: the probe is out; good ones so far
        self._outcomes = 0  # closed: the last ones, as bits; 1 is a failure
        self._seen = 0  # closed: how many they are
        self._row = 0  # closed: failures in a row

    def _succeeded(self) -> None:
        if self._opened:
            self._probing = False
            self._good += 1
            if self._good >= self._rules.needed:
                self._close()
            return
        self._row = 0
        self._count(0)

    def _failed(self, now: float) -> None:
        if self._opened:
            self._open(now)
            return
        self._row += 1
        self._count(1)
        rules = self._rules
        too_many = self._seen >= rules.least and self._outcomes.bit_count() > rules.failed_share * self._seen
        if self._row >= rules.failures or too_many:
            self._open(now)

    def _count(self, failed: int) -> None:
        window = self._rules.window
        self._outcomes = (self._outcomes << 1 | failed) & ((1 << window) - 1)
        if self._seen < window:
            self._seen += 1

    def check(self) -> None:
        """Assert that each state has only what belongs to it."""
        assert self._opened or not (self._probing or self._good)
        assert 0 <= self._good < self._rules.needed
        assert 0 <= self._seen <= self._rules.window
        assert self._outcomes.bit_length() <= self._seen
        assert self._opened or self._row < self._rules.failures
        assert self._outcomes & ((1 << self._row) - 1) == (1 << min(self._row, self._seen)) - 1

    def __repr__(self) -> str:
        if not self._opened:
            return f"<Breaker closed, {self._outcomes.bit_count()} of {self._seen} failed>"
        return (
            f"<Breaker opened {self._opened} times in a row, until {self.retry_at:.3f}{', probing' if self._probing else ''}>"
        )
