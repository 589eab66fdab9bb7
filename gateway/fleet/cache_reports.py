"""Compares predicted cached tokens with the engine's reports. One `Overlap` per replica takes every metered answer.

A prefix that was sent to a replica before should be cached there. If the engine reports zero cached tokens for request after
request, its prefix cache is off or cannot match, and routing by prefix is useless. This is logged once as a warning, until the
first hit. An engine without reports is another case, because missing is not zero: the cache may work, but savings are unknown.

Only answers with predicted cached tokens count. Evidence is a minimum number of requests and of tokens in a row. A hit resets
the row, and so does a restart, after which zero is expected. SILENT is reported once, ZERO once until a hit, HIT once after
each ZERO.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ENOUGH_REQUESTS = 20
ENOUGH_TOKENS = 20_000


class CacheFinding(enum.Enum):
    """Result of an answer."""

    ZERO = "cached tokens are reported, and always zero"
    SILENT = "cached tokens are not reported at all"
    HIT = "the first hit after ZERO"


@dataclass(slots=True)
class Overlap:
    """The present row of answers with predicted cached tokens: their number and those tokens. zero, silent: findings already
    reported.
    """

    requests: int = 0
    tokens: int = 0
    reports: bool = False
    zero: bool = False
    silent: bool = False

    def metered(self, predicted: int, reported: int | None) -> CacheFinding | None:
        """One answer's cached tokens, as predicted and as reported (None: not reported). Returns a new finding. O(1)."""
        if reported is not None and not self.reports:
            self.reports = True
            self.restart()  # until now no report came
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
        """Reset the row, as after a restart of the replica."""
        self.requests = self.tokens = 0

    def _once(self) -> CacheFinding | None:
        if self.reports:
            known, self.zero = self.zero, True
            return None if known else CacheFinding.ZERO
        known, self.silent = self.silent, True
        return None if known else CacheFinding.SILENT
