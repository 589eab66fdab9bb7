"""Days and months in UTC, for budgets. Pure."""

from __future__ import annotations

import calendar
from datetime import UTC, datetime
from typing import Final

from gateway.features.keys.limits.account import Day
from gateway.features.keys.limits.limiter import DAY_S, Moment

_LAST: Final = 253_402_300_799.0  # the last second of the year 9999


class Calendar:
    """Converts clock times to moments. The date is computed once per day. O(1)."""

    __slots__ = ("_begins", "_day", "_days_left", "_ends")

    def __init__(self) -> None:
        self._begins = self._ends = 0.0  # of the day, in Unix seconds
        self._day: Day = 0
        self._days_left = 0  # of the month, after today

    def moment(self, now: float, wall: float) -> Moment:
        """now: monotonic seconds. wall: Unix seconds."""
        if not self._begins <= wall < self._ends:
            wall = min(max(wall, 0.0), _LAST)
            self._begins = wall // DAY_S * DAY_S
            self._ends = self._begins + DAY_S
            date = datetime.fromtimestamp(wall, UTC)
            self._day = day_number(date.year, date.month, date.day)
            self._days_left = calendar.monthrange(date.year, date.month)[1] - date.day
        to_day_s = self._ends - wall
        return Moment(now, self._day, to_day_s, to_day_s + self._days_left * DAY_S)


def day_number(year: int, month: int, day: int) -> Day:
    """A number for each day. Divided by 31 it is equal for all days of a month."""
    return (year * 12 + month - 1) * 31 + day - 1


def day_text(day: Day) -> str:
    """YYYY-MM-DD."""
    month, rest = divmod(day, 31)
    return f"{month // 12:04d}-{month % 12 + 1:02d}-{rest + 1:02d}"


def day_of_text(text: str) -> Day:
    """Raises ValueError."""
    year, month, day = text.split("-")
    return day_number(int(year), int(month), int(day))
