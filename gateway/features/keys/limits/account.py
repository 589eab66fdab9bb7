"""What one key has used and reserved: here, and at each other process, as far as it has said so.

What others have spent is also kept as one sum, for each request asks for it. Sums are by day and by month; days and processes
are bounded: those that were silent for longest are kept as one sum. Pure.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from gateway.features.keys.limits.rate import Rate

MAX_PROCESSES: Final = 1024  # of which each has a sum of its own
KEPT_DAYS: Final = 62
GUARDED: Final = 4  # exchanges
_MOST: Final = 9 * 10**18  # picodollars of a day: what a column of a database holds

# A day, as a number that grows through the months, of which each has 31: see `calendar.day_number`.
Day = int
# A process's totals for one key: its name, requests and tokens since the process began, picodollars that are reserved, and for
# each day those that were spent.
Total = tuple[str, int, int, int, tuple[tuple[Day, int], ...]]


class KeyLimits:
    """0: there is none. requests, tokens: per minute. day, month: picodollars."""

    __slots__ = ("day", "month", "requests", "tokens")

    def __init__(self, requests: int = 0, tokens: int = 0, day: int = 0, month: int = 0) -> None:
        self.requests = requests
        self.tokens = tokens
        self.day = day
        self.month = month

    @property
    def any(self) -> bool:
        return bool(self.requests or self.tokens or self.day or self.month)


class SpentTotals:
    """Of one process, or of all others. months: the sums of days, for each request asks for this month's."""

    __slots__ = ("days", "months", "requests", "reserved", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.reserved = 0
        self.days: dict[Day, int] = {}
        self.months: dict[int, int] = {}

    def put(self, day: Day, amount: int) -> None:
        """In the place of what the day had. O(1)."""
        month = day // 31
        self.months[month] = self.months.get(month, 0) + amount - self.days.get(day, 0)
        self.days[day] = amount

    def drop(self, day: Day) -> None:
        """Forget a day. O(1)."""
        month = day // 31
        left = self.months.get(month, 0) - self.days.pop(day)
        if left:
            self.months[month] = left
        else:
            self.months.pop(month, None)

    def check(self) -> None:
        """O(days)."""
        for month in self.months.keys() | {day // 31 for day in self.days}:
            found = sum([amount for day, amount in self.days.items() if day // 31 == month])
            assert self.months.get(month, 0) == found, self.months


class KeyAccount:
    """One key's. others: by process, that of the latest news last. gone: of those that were there before MAX_PROCESSES others.
    elsewhere: of all of them together.
    """

    __slots__ = (
        "admitted",
        "elsewhere",
        "gone",
        "id",
        "limits",
        "open",
        "others",
        "output",
        "own",
        "requests",
        "tokens",
        "unsent",
        "unwritten",
    )

    def __init__(self, id_: str, limits: KeyLimits) -> None:
        self.id = id_
        self.limits = limits
        self.own = SpentTotals()
        self.unsent = set[Day]()  # days of `own` that have changed since the last exchange
        self.unwritten = set[Day]()  # likewise, since they were last taken to be written
        self.others: dict[str, SpentTotals] = {}
        self.gone = SpentTotals()
        self.elsewhere = SpentTotals()
        self.admitted = [0] * GUARDED  # picodollars that were reserved since the last exchange, between the last two, and so on
        self.open = 0  # reservations
        self.output = 0.0  # tokens of recent answers
        self.requests = Rate(limits.requests) if limits.requests else None
        self.tokens = Rate(limits.tokens) if limits.tokens else None

    def retune(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.requests = _retuned(self.requests, limits.requests)
        self.tokens = _retuned(self.tokens, limits.tokens)

    def spent(self, day: Day) -> int:
        """O(1)."""
        return self.own.days.get(day, 0) + self.elsewhere.days.get(day, 0)

    def spent_in_month(self, day: Day) -> int:
        """O(1)."""
        month = day // 31
        return self.own.months.get(month, 0) + self.elsewhere.months.get(month, 0)

    @property
    def reserved(self) -> int:
        """O(1)."""
        return self.own.reserved + self.elsewhere.reserved

    def spend(self, day: Day, amount: int) -> None:
        """By this process. O(1) mostly."""
        own = self.own
        own.put(day, min(own.days.get(day, 0) + amount, _MOST))
        self.unsent.add(day)
        self.unwritten.add(day)
        if len(own.days) > KEPT_DAYS:
            own.drop(min(own.days))

    def other(self, process: str) -> SpentTotals:
        """A process of which there is news. Each life of a worker is one: those that were silent for longest have ended, and
        what they have spent is kept as one sum. O(days).
        """
        seen = self.others.pop(process, None)
        if seen is None:
            seen = SpentTotals()
            if len(self.others) >= MAX_PROCESSES:
                self._fold(self.others.pop(next(iter(self.others))))
        self.others[process] = seen
        return seen

    def _fold(self, process: SpentTotals) -> None:
        self.reserve_elsewhere(process, 0)
        gone = self.gone
        for day, amount in process.days.items():
            gone.put(day, gone.days.get(day, 0) + amount)
        while len(gone.days) > KEPT_DAYS:
            oldest = min(gone.days)
            self._add_elsewhere(oldest, -gone.days[oldest])
            gone.drop(oldest)

    def forget_others(self, but: Container[str]) -> None:
        """What all but these processes have spent; not what they had used, from which their next totals count."""
        self.gone, self.elsewhere = SpentTotals(), SpentTotals()
        for name, each in self.others.items():
            if name not in but:
                each.days.clear()
                each.months.clear()
            self.elsewhere.reserved += each.reserved
            for day, amount in each.days.items():
                self._add_elsewhere(day, amount)

    def spend_elsewhere(self, process: SpentTotals, day: Day, amount: int) -> None:
        """The process has spent so much on that day at least. O(1) mostly."""
        before = process.days.get(day, 0)
        process.put(day, max(before, amount))
        self._add_elsewhere(day, process.days[day] - before)
        if len(process.days) > KEPT_DAYS:
            oldest = min(process.days)
            self._add_elsewhere(oldest, -process.days[oldest])
            process.drop(oldest)

    def reserve_elsewhere(self, process: SpentTotals, amount: int) -> None:
        """The process has reserved this much. O(1)."""
        self.elsewhere.reserved += amount - process.reserved
        process.reserved = amount

    def _add_elsewhere(self, day: Day, amount: int) -> None:
        left = self.elsewhere.days.get(day, 0) + amount
        if left:
            self.elsewhere.put(day, left)
        elif day in self.elsewhere.days:
            self.elsewhere.drop(day)

    def check(self) -> None:
        """O(processes and days)."""
        others = [self.gone, *self.others.values()]
        for each in (self.own, self.elsewhere, *others):
            each.check()
        assert self.elsewhere.reserved == sum([each.reserved for each in others]), self
        for day in {day for each in others for day in each.days} | self.elsewhere.days.keys():
            found = sum([each.days.get(day, 0) for each in others])
            assert self.elsewhere.days.get(day, 0) == found, self.elsewhere.days

    def __repr__(self) -> str:
        return f"<Account of {self.id}: {self.open} open, {self.own.reserved} reserved>"


def later(before: Total, after: Total) -> Total:
    """Two totals of one key, the second one later, as one."""
    return (*after[:4], tuple({**dict(before[4]), **dict(after[4])}.items()))


def _retuned(rate: Rate | None, per_minute: int) -> Rate | None:
    if not per_minute:
        return None
    return Rate(per_minute) if rate is None else rate.resized(per_minute)
