"""Parses periods of users: durations before now, and times (UTC)."""

from __future__ import annotations

import datetime
import re
from typing import Final

from gateway.features.ledger.sums import DAY_MS, LAST_MS, Period

EXPECTED: Final = "a duration such as 7d, 24h, 90m or 2w, or a time such as 2026-11-01 or 2026-11-01T12:00 (UTC)"
_DURATION: Final = re.compile(r"([0-9]{1,9})([mhdw])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

PeriodBound = int | datetime.datetime
"""Seconds before now, or a time."""


class PeriodError(ValueError):
    """The period is invalid. The message says why."""


def parse_bound(text: str) -> PeriodBound:
    """Raises PeriodError."""
    if found := _DURATION.fullmatch(text):
        return int(found[1]) * _SECONDS[found[2]]
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise PeriodError(f"{EXPECTED} is expected, got {text[:40]!r}") from None
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def period(since: PeriodBound, until: PeriodBound | None, now: float) -> Period:
    """The period between two bounds. until: None: the end of today, so that rows from clocks ahead do not count. now: Unix
    seconds.

    Raises PeriodError if it ends before it begins.
    """
    ends = (int(now * 1000) // DAY_MS + 1) * DAY_MS
    begin, end = _milliseconds(since, now), ends if until is None else _milliseconds(until, now)
    if begin >= min(end, int(now * 1000) if until is None else end):
        raise PeriodError("the period ends before it begins: --since must be before --until and before now")
    return Period(begin, end)


def _milliseconds(bound: PeriodBound, now: float) -> int:
    """Unix milliseconds, limited to the years 1970 to 9999."""
    if isinstance(bound, datetime.datetime):
        return min(max(0, (bound - _EPOCH) // datetime.timedelta(milliseconds=1)), LAST_MS)
    return max(0, int(now * 1000) - bound * 1000)
