"""The use and the reservations of one key: of this process, and of other processes by their latest totals.

The totals of the other processes are also kept as one sum, because every request needs it. Sums are by day and by month. Days
and processes are bounded: the processes with the oldest news are folded into one sum. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from gateway.features.keys.limits.rate import Rate

MAX_PROCESSES: Final = 1024  # other processes with a separate sum
RETAINED_DAYS: Final = 62
GUARDED_EXCHANGES: Final = 4  # exchanges within which other processes learn of an admission
_MOST: Final = 9 * 10**18  # picodollars per day: the limit of the database column

# A day as a number, with 31 days in each month: see `calendar.day_number`.
Day = int
# Totals of one process for one key: the key's id, requests and tokens since the process began, reserved picodollars, and the
# spent picodollars of each day.
Total = tuple[str, int, int, int, tuple[tuple[Day, int], ...]]


class KeyLimits:
    """requests, tokens: per minute. day, month: picodollars. 0: unlimited. credits: picodollars by which an operator has raised
    the budget of a day, and so of its month.
    """

    __slots__ = ("credits", "day", "month", "requests", "tokens")

    def __init__(
        self, requests: int = 0, tokens: int = 0, day: int = 0, month: int = 0, credited: Sequence[tuple[Day, int]] = ()
    ) -> None:
        self.requests = requests
        self.tokens = tokens
        self.day = day
        self.month = month
        self.credits = tuple(credited)

    def of_day(self, day: Day) -> int:
        """The budget of this day. O(credits)."""
        return self.day + sum([amount for credited, amount in self.credits if credited == day])

    def of_month(self, day: Day) -> int:
        """The budget of the month of this day. O(credits)."""
        return self.month + sum([amount for credited, amount in self.credits if credited // 31 == day // 31])

    @property
    def any(self) -> bool:
        return bool(self.requests or self.tokens or self.day or self.month)


class SpentTotals:
    """The totals of one process, or of all other processes. months: sums of the days, because every request needs this month's
    sum.
    """

    __slots__ = ("days", "months", "requests", "reserved", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.reserved = 0
        self.days: dict[Day, int] = {}
        self.months: dict[int, int] = {}

    def set_day(self, day: Day, amount: int) -> None:
        """Replaces the amount of a day. O(1)."""
        month = day // 31
        self.months[month] = self.months.get(month, 0) + amount - self.days.get(day, 0)
        self.days[day] = amount

    def drop(self, day: Day) -> None:
        """Removes a day. O(1)."""
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
    """The account of one key. by_process: totals of the other processes, latest news last. folded: sum of the processes removed
    from by_process because of MAX_PROCESSES. others_total: sum of all other processes.
    """

    __slots__ = (
        "admitted",
        "by_process",
        "folded",
        "id",
        "limits",
        "open",
        "others_total",
        "output",
        "own",
        "requests",
        "tokens",
        "unsent",
        "unwritten",
        "warned_day",
        "warned_month",
    )

    def __init__(self, id_: str, limits: KeyLimits) -> None:
        self.id = id_
        self.limits = limits
        self.own = SpentTotals()
        self.unsent = set[Day]()  # days of `own` that changed since the last exchange
        self.unwritten = set[Day]()  # days of `own` that changed since they were last written
        self.by_process: dict[str, SpentTotals] = {}
        self.folded = SpentTotals()
        self.others_total = SpentTotals()
        self.admitted = [
            0
        ] * GUARDED_EXCHANGES  # picodollars reserved since the last exchange, in the interval before it, and so on
        self.open = 0  # open reservations
        self.warned_day: Day = -1  # the last day, and the last month, whose budget was reported as nearly spent
        self.warned_month = -1
        self.output = 0.0  # tokens of the longest recent answer, fading
        self.requests = Rate(limits.requests) if limits.requests else None
        self.tokens = Rate(limits.tokens) if limits.tokens else None

    def set_limits(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.requests = _rate_with_limit(self.requests, limits.requests)
        self.tokens = _rate_with_limit(self.tokens, limits.tokens)

    def spent(self, day: Day) -> int:
        """O(1)."""
        return self.own.days.get(day, 0) + self.others_total.days.get(day, 0)

    def spent_in_month(self, day: Day) -> int:
        """O(1)."""
        month = day // 31
        return self.own.months.get(month, 0) + self.others_total.months.get(month, 0)

    @property
    def reserved(self) -> int:
        """O(1)."""
        return self.own.reserved + self.others_total.reserved

    def spend(self, day: Day, amount: int) -> None:
        """Adds spending of this process. O(1) mostly."""
        own = self.own
        own.set_day(day, min(own.days.get(day, 0) + amount, _MOST))
        self.unsent.add(day)
        self.unwritten.add(day)
        if len(own.days) > RETAINED_DAYS:
            own.drop(min(own.days))

    def process_totals(self, process: str) -> SpentTotals:
        """The totals of another process, which become the latest. A restarted worker is a new process; the processes with the
        oldest news have probably ended, so they are folded into one sum. O(days).
        """
        totals = self.by_process.pop(process, None)
        if totals is None:
            totals = SpentTotals()
            if len(self.by_process) >= MAX_PROCESSES:
                self._fold(self.by_process.pop(next(iter(self.by_process))))
        self.by_process[process] = totals
        return totals

    def _fold(self, process: SpentTotals) -> None:
        self.set_process_reserved(process, 0)
        folded = self.folded
        for day, amount in process.days.items():
            folded.set_day(day, folded.days.get(day, 0) + amount)
        while len(folded.days) > RETAINED_DAYS:
            oldest = min(folded.days)
            self._add_to_others(oldest, -folded.days[oldest])
            folded.drop(oldest)

    def forget_spending_of_others(self, except_: Container[str]) -> None:
        """Forgets the spending of all other processes except these. Their requests and tokens are kept, as the base of later
        differences.
        """
        self.folded, self.others_total = SpentTotals(), SpentTotals()
        for name, each in self.by_process.items():
            if name not in except_:
                each.days.clear()
                each.months.clear()
            self.others_total.reserved += each.reserved
            for day, amount in each.days.items():
                self._add_to_others(day, amount)

    def add_process_spending(self, process: SpentTotals, day: Day, amount: int) -> None:
        """The process has spent at least this amount on that day. O(1) mostly."""
        before = process.days.get(day, 0)
        process.set_day(day, max(before, amount))
        self._add_to_others(day, process.days[day] - before)
        if len(process.days) > RETAINED_DAYS:
            oldest = min(process.days)
            self._add_to_others(oldest, -process.days[oldest])
            process.drop(oldest)

    def set_process_reserved(self, process: SpentTotals, amount: int) -> None:
        """Sets the reserved amount of a process. O(1)."""
        self.others_total.reserved += amount - process.reserved
        process.reserved = amount

    def _add_to_others(self, day: Day, amount: int) -> None:
        left = self.others_total.days.get(day, 0) + amount
        if left:
            self.others_total.set_day(day, left)
        elif day in self.others_total.days:
            self.others_total.drop(day)

    def check(self) -> None:
        """O(processes and days)."""
        parts = [self.folded, *self.by_process.values()]
        for each in (self.own, self.others_total, *parts):
            each.check()
        assert self.others_total.reserved == sum([each.reserved for each in parts]), self
        for day in {day for each in parts for day in each.days} | self.others_total.days.keys():
            found = sum([each.days.get(day, 0) for each in parts])
            assert self.others_total.days.get(day, 0) == found, self.others_total.days

    def __repr__(self) -> str:
        return f"<Account of {self.id}: {self.open} open, {self.own.reserved} reserved>"


def merged(before: Total, after: Total) -> Total:
    """Merges two totals of one key; `after` is the later one."""
    return (*after[:4], tuple({**dict(before[4]), **dict(after[4])}.items()))


def _rate_with_limit(rate: Rate | None, per_minute: int) -> Rate | None:
    if not per_minute:
        return None
    return Rate(per_minute) if rate is None else rate.resized(per_minute)
