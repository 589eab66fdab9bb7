"""Periods as users write them: durations before now, and moments (UTC)."""

from __future__ import annotations

import datetime
import re
from typing import Final

from gateway.features.ledger.sums import DAY_MS, LAST_MS, Period

EXPECTED: Final = "a duration such as 7d, 24h, 90m or 2w, or a moment such as 2026-11-01 or 2026-11-01T12:00 (UTC)"
_DURATION: Final = re.compile(r"([0-9]{1,9})([mhdw])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Moment = int | datetime.datetime
"""Seconds before now, or a moment."""


class PeriodError(ValueError):
    """Its text says what is wrong."""


def moment(text: str) -> Moment:
    """Raises PeriodError."""
    if found := _DURATION.fullmatch(text):
        return int(found[1]) * _SECONDS[found[2]]
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise PeriodError(f"{EXPECTED} is expected, got {text[:40]!r}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def period(since: Moment, until: Moment | None, now: float) -> Period:
    """until: None: the end of today, for nothing that a clock has put into the future belongs in. now: Unix seconds.

    Raises PeriodError if it ends before it begins.
    """
    ends = (int(now * 1000) // DAY_MS + 1) * DAY_MS
    begin, end = _milliseconds(since, now), ends if until is None else _milliseconds(until, now)
    if begin >= min(end, int(now * 1000) if until is None else end):
        raise PeriodError("the period ends before it begins: --since has to be before --until, and before now")
    return Period(begin, end)


def _milliseconds(moment: Moment, now: float) -> int:
    """What is before 1970 is its beginning, and what is after the year 9999 its end: nothing is older, or later."""
    if isinstance(moment, datetime.datetime):
        return min(max(0, (moment - _EPOCH) // datetime.timedelta(milliseconds=1)), LAST_MS)
    return max(0, int(now * 1000) - moment * 1000)
