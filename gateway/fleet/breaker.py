"""Circuit breaker: cuts off a replica whose answers to requests fail. The active probes are in `prober.py`.

    closed ── `failures` in a row, or too large a share of the last `window` ──► open ── back-off is over ──► half open
      ▲                                                                           ▲                             │
      │                                                                           └──── the probe failed ◄──────┤
      └──────────────────────────────────────────────────────── `needed` probes in a row succeeded ◄────────────┘

Half open, it lets one request through at a time, the probe. Each failed probe doubles the back-off; closing resets everything.
The probe's slot is free again once the replica begins to answer, and at the latest after about the back-off: one long or silent
answer must not exclude a recovered replica. Each probe without an answer doubles that time, so that a silent replica does not
collect requests.

An answer is judged at its beginning. If it breaks off later, the last recorded success becomes a failure (the answer's own may
have left the window). It counts for the share, not for the row, because the request itself may cause the break. There is one
exception: if the broken answer was the probe that closed the breaker, and fewer than `least` other outcomes followed, the
breaker opens again as if the probe had failed, because that probe was the only evidence.

`begin` returns a `Trial`: it is judged once, and an attempt without a verdict (its client disconnected) frees the probe's slot
by `abandoned`. Only attempts that began in the present state count. Otherwise each of a hundred requests that fail together
would double the back-off.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"
IGNORED: Final = -1  # the era of attempts that are not counted


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """failures: this many in a row open the breaker. failed_share: a failure also opens it if more than this share of the last
    `window` outcomes, of at least `least`, are failures. needed: successful probes in a row that close it. back_off_s, most_s:
    first and longest time for which it stays open; a random part of up to a quarter is subtracted.
    """

    failures: int = 5
    failed_share: float = 0.5
    least: int = 20
    window: int = 64
    needed: int = 1
    back_off_s: float = 1.0
    most_s: float = 30.0


class Trial:
    """One attempt at a replica, made by `Breaker.begin`. begun: its start. Only the first verdict counts."""

    __slots__ = ("_breaker", "_closed", "_era", "_good", "begun")

    def __init__(self, breaker: Breaker, era: int, begun: float) -> None:
        self.begun = begun
        self._breaker: Breaker | None = breaker
        self._era = era
        self._good: Breaker | None = None  # the breaker that counted this attempt as a success
        self._closed = False  # True if that success closed the breaker

    def answers(self) -> None:
        """The replica begins to answer. This is no verdict yet, but frees the probe's slot."""
        breaker = self._breaker
        if breaker is not None and breaker._probe is self:
            breaker._probe = None

    def success(self) -> None:
        """The replica answers well. Called at the answer's beginning, because a stream takes long."""
        if breaker := self._judged():
            self._closed = breaker._succeeded()
            self._good, self._era = breaker, breaker._era

    def broke_off(self, now: float) -> None:
        """An answer that had begun well did not reach its end, through the replica's fault."""
        breaker, self._good = self._good, None
        if breaker is not None and breaker._era == self._era:
            breaker._broke_off(now, closed=self._closed)

    def failure(self, now: float) -> None:
        if breaker := self._judged():
            breaker._failed(now)

    def abandoned(self) -> None:
        """End the attempt without a verdict."""
        self._judged()

    def _judged(self) -> Breaker | None:
        """The breaker, if this verdict counts: the first one, in the state in which the attempt began."""
        breaker, self._breaker = self._breaker, None
        if breaker is None or breaker._era != self._era:
            return None
        if breaker._probe is self:
            breaker._probe = None
        return breaker

    def __repr__(self) -> str:
        return f"<Trial {'judged' if self._breaker is None else 'under way'}>"


class Breaker:
    """Circuit breaker of one replica (see the module). All operations O(1). retry_at: no request is allowed before."""

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
        self._era = 0  # number of times it has opened or closed
        self.retry_at = float("-inf")
        self._probe: Trial | None = None  # half open: the running probe
        self._unanswered = 0  # half open: probes that lost their slot before an answer
        self._opened_before = 0  # value of `_opened` when it last closed
        self._close()

    def state(self, now: float) -> str:
        if not self._opened:
            return CLOSED
        return OPEN if now < self.retry_at else HALF_OPEN

    def allows(self, now: float) -> bool:
        """True if a request may be sent. Changes nothing."""
        return not self._opened or (now >= self.retry_at and (self._probe is None or now >= self._probe_until))

    def begin(self, now: float) -> Trial:
        """Count a request; half open it takes the probe's slot. A request without permission may be sent, but is not
        counted.
        """
        if not self._opened:
            return Trial(self, self._era, now)
        if not self.allows(now):
            return Trial(self, IGNORED, now)
        self._unanswered += self._probe is not None
        self._probe = probe = Trial(self, self._era, now)
        self._probe_until = now + self._doubled(self._opened - 1 + self._unanswered)
        return probe

    def _doubled(self, times: int) -> float:
        """The first back-off, doubled this many times, in seconds."""
        return min(self._rules.most_s, self._rules.back_off_s * 2.0 ** min(times, 30))

    def _open(self, now: float) -> None:
        self.retry_at = now + self._doubled(self._opened) * (0.75 + self._chance.random() / 4)
        self._opened += 1
        self._era += 1
        self._no_probe()

    def _close(self) -> None:
        self._opened = 0  # number of times it opened in a row; 0: closed
        self._no_probe()
        self._outcomes = 0  # closed: latest outcomes as bits; 1 is a failure
        self._seen = 0  # closed: number of outcomes
        self._row = 0  # closed: failures in a row

    def _no_probe(self) -> None:
        self._probe = None
        self._probe_until = float("-inf")  # end of the probe's slot
        self._unanswered = 0
        self._good = 0  # half open: successful probes in a row

    def _succeeded(self) -> bool:
        """Count a success. True if it closes the breaker."""
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
        """Turn the latest success into a failure. closed: it was the one with which the breaker closed."""
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
        if failed or self._outcomes:  # mostly there are no failures to be shifted
            self._outcomes = (self._outcomes << 1 | failed) & ((1 << window) - 1)
        if self._seen < window:
            self._seen += 1

    def check(self) -> None:
        """Raises AssertionError if a value does not fit the state."""
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
