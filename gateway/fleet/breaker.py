"""Circuit breaker: cuts off a replica whose answers to requests fail. The active probes are in `prober.py`.

    closed ── `failures` in a row, or too large a share of the last `window` ──► open ── back-off is over ──► half open
      ▲                                                                           ▲                             │
      │                                                                           └──── the probe failed ◄──────┤
      └──────────────────────────────────────────────────────── `needed` probes in a row succeeded ◄────────────┘

Half open, it lets one request through at a time, the probe. Each failed probe doubles the back-off; closing forgets it all.
The probe's slot is free again as soon as the replica begins to answer, and at the latest after about the back-off: one long
or silent answer must not keep a replica out that is well again. Each probe that stays without an answer doubles that time, so
that a replica that answers nothing does not collect requests.

An answer is judged at its beginning. If it breaks off later, the last success becomes a failure (its own one may be out of the
window), which counts for the share, not for the row: it may be the request that breaks answers off. If it was the probe that
closed the breaker, and fewer than `least` others have been judged since, the breaker opens again as if the probe had failed:
until then it alone spoke for the replica, and later the share does.

`begin` returns a `Trial`: it is judged once, and an attempt without a verdict (its client went away) frees the probe's slot
by `abandoned`. Only attempts that began in the present state count: those sent before the breaker opened are no news, or each
of a hundred requests that die together would double the back-off.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
IGNORED: Final = -1  # the era of attempts that do not count


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


class Trial:
    """One request on its way to a replica, since `begun`. Made by `Breaker.begin`; the first verdict counts."""

    __slots__ = ("_breaker", "_closed", "_era", "_good", "begun")

    def __init__(self, breaker: Breaker, era: int, begun: float) -> None:
        self.begun = begun
        self._breaker: Breaker | None = breaker
        self._era = era
        self._good: Breaker | None = None  # the breaker that has counted it as a success
        self._closed = False  # whether that success closed it

    def answers(self) -> None:
        """The replica begins to answer. No verdict yet, but if this is the probe, another one may be sent."""
        breaker = self._breaker
        if breaker is not None and breaker._probe is self:
            breaker._probe = None

    def success(self) -> None:
        """The replica answers as it should; to be called at the answer's beginning, for a stream is long."""
        if breaker := self._judged():
            self._closed = breaker._succeeded()
            self._good, self._era = breaker, breaker._era

    def broke_off(self, now: float) -> None:
        """The answer that had begun well did not come to its end, by the replica's fault."""
        breaker, self._good = self._good, None
        if breaker is not None and breaker._era == self._era:
            breaker._broke_off(now, closed=self._closed)

    def failure(self, now: float) -> None:
        if breaker := self._judged():
            breaker._failed(now)

    def abandoned(self) -> None:
        """It shows nothing about the replica."""
        self._judged()

    def _judged(self) -> Breaker | None:
        """The breaker, if the verdict counts: not a second one, nor one of an attempt that began in another state."""
        breaker, self._breaker = self._breaker, None
        if breaker is None or breaker._era != self._era:
            return None
        if breaker._probe is self:
            breaker._probe = None
        return breaker

    def __repr__(self) -> str:
        return f"<Trial {'judged' if self._breaker is None else 'under way'}>"


class Breaker:
    """See the top of this file. All operations O(1). retry_at: before then no request is let through."""

    __slots__ = (
        "_chance",
        "_era",
        "_good",
        "_opened",
        "_opened_before",
        "_outcomes",
        "_probe",
        "_probe_until",
        "_row",
        "_rules",
        "_seen",
        "_unanswered",
        "retry_at",
    )

    def __init__(self, chance: Random, rules: BreakerRules | None = None) -> None:
        self._chance = chance
        self._rules = rules or BreakerRules()
        self._era = 0  # how often it has opened or closed
        self.retry_at = float("-inf")
        self._probe: Trial | None = None  # half open: the one that is out
        self._unanswered = 0  # half open: probes that were out for longer than they hold the slot
        self._opened_before = 0  # times in a row before it closed
        self._close()

    def state(self, now: float) -> str:
        if not self._opened:
            return CLOSED
        return OPEN if now < self.retry_at else HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Changes nothing."""
        return not self._opened or (now >= self.retry_at and (self._probe is None or now >= self._probe_until))

    def begin(self, now: float) -> Trial:
        """A request is sent: half open it takes the probe's slot. One that is not allowed may be sent, but does not count."""
        if not self._opened:
            return Trial(self, self._era, now)
        if not self.allows(now):
            return Trial(self, IGNORED, now)
        self._unanswered += self._probe is not None
        self._probe = probe = Trial(self, self._era, now)
        self._probe_until = now + self._doubled(self._opened - 1 + self._unanswered)
        return probe

    def _doubled(self, times: int) -> float:
        """The first back-off, doubled so many times, in seconds."""
        return min(self._rules.most_s, self._rules.back_off_s * 2.0 ** min(times, 30))

    def _open(self, now: float) -> None:
        self.retry_at = now + self._doubled(self._opened) * (0.75 + self._chance.random() / 4)
        self._opened += 1
        self._era += 1
        self._no_probe()

    def _close(self) -> None:
        self._opened = 0  # times in a row
        self._no_probe()
        self._outcomes = 0  # closed: the last ones, as bits; 1 is a failure
        self._seen = 0  # closed: how many they are
        self._row = 0  # closed: failures in a row

    def _no_probe(self) -> None:
        self._probe = None
        self._probe_until = float("-inf")  # then another one may be sent
        self._unanswered = 0
        self._good = 0  # half open: good ones in a row

    def _succeeded(self) -> bool:
        """Whether that closes it."""
        if self._opened:
            self._good += 1
            if self._good < self._rules.needed:
                return False
            self._era += 1
            self._opened_before = self._opened
            self._close()
            return True
        self._row = 0
        self._count(0)
        return False

    def _broke_off(self, now: float, *, closed: bool) -> None:
        """One of the present state's successes was none. closed: the one that closed it."""
        if closed and self._seen < self._rules.least:
            self._opened = self._opened_before
        if self._opened:
            self._open(now)
            return
        successes = ~self._outcomes & ((1 << self._seen) - 1)
        self._outcomes |= successes & -successes  # the last one
        if self._too_many():
            self._open(now)

    def _failed(self, now: float) -> None:
        if self._opened:
            self._open(now)
            return
        self._row += 1
        self._count(1)
        if self._row >= self._rules.failures or self._too_many():
            self._open(now)

    def _too_many(self) -> bool:
        rules = self._rules
        return self._seen >= rules.least and self._outcomes.bit_count() > rules.failed_share * self._seen

    def _count(self, failed: int) -> None:
        window = self._rules.window
        if failed or self._outcomes:  # mostly there are no failures to be moved along
            self._outcomes = (self._outcomes << 1 | failed) & ((1 << window) - 1)
        if self._seen < window:
            self._seen += 1

    def check(self) -> None:
        """Assert that each state has only what belongs to it."""
        assert self._opened or not (self._probe or self._good or self._unanswered)
        assert 0 <= self._good < self._rules.needed
        assert 0 <= self._seen <= self._rules.window
        assert self._outcomes.bit_length() <= self._seen
        assert self._opened or self._row < self._rules.failures
        assert self._outcomes & ((1 << self._row) - 1) == (1 << min(self._row, self._seen)) - 1

    def __repr__(self) -> str:
        if not self._opened:
            return f"<Breaker closed, {self._outcomes.bit_count()} of {self._seen} failed>"
        return f"<Breaker opened {self._opened} times in a row, until {self.retry_at:.3f}{', probing' if self._probe else ''}>"
