"""Does what we predict overlap with what the engine reports? One `Overlap` per replica is fed with every metered answer.

A prefix that was sent to a replica before should be cached there. If request after request the engine reports no cached token
at all, its prefix cache is off or cannot match, and routing by prefix is in vain: worth one warning, until the first hit. An
engine that reports nothing is another case, for missing is not zero: the cache may work, only the savings cannot be seen.

Only answers count for which cached tokens were predicted. Evidence is enough requests and enough tokens in a row; a hit starts
the row anew, and so does a restart, after which zero is to be expected. SILENT is reported once, ZERO once until a hit,
HIT once after each ZERO.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ENOUGH_REQUESTS = 20
ENOUGH_TOKENS = 20_000


class CacheFinding(enum.Enum):
    """What an answer has just shown."""

    ZERO = "cached tokens are reported, and always zero"
    SILENT = "cached tokens are not reported at all"
    HIT = "the first hit after ZERO"


@dataclass(slots=True)
class Overlap:
    """The row so far: requests with predicted cached tokens, and those tokens. zero, silent: findings that were reported."""

    requests: int = 0
    tokens: int = 0
    reports: bool = False
    zero: bool = False
    silent: bool = False

    def metered(self, predicted: int, reported: int | None) -> CacheFinding | None:
        """One answer's cached tokens, as predicted and as reported (None: not reported). Returns a new finding. O(1)."""
        if reported is not None and not self.reports:
            self.reports = True
            self.restart()  # the row so far was one of silence
        if reported:
            was_zero, self.zero = self.zero, False
            self.restart()
            return CacheFinding.HIT if was_zero else None
        if predicted <= 0 or (reported is None and self.reports):
            return None
        self.requests += 1
        self.tokens += predicted
        if self.requests < ENOUGH_REQUESTS or self.tokens < ENOUGH_TOKENS:
            return None
        return self._once()

    def restart(self) -> None:
        """Start the row anew, as after a restart of the replica."""
        self.requests = self.tokens = 0

    def _once(self) -> CacheFinding | None:
        if self.reports:
            known, self.zero = self.zero, True
            return None if known else CacheFinding.ZERO
        known, self.silent = self.silent, True
        return None if known else CacheFinding.SILENT
