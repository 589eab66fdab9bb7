"""Columns and groups of the ledger's sums, and sums of a period. Without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

GROUP: Final = ("day", "tenant", "key", "model", "pool", "endpoint")
# Of rows only: the daily sums would have too many groups.
ROW_GROUP: Final = ("run", "workflow", "session", "agent", "parent", "client", "user_agent", "code")
COUNTS: Final = (
    *("requests", "failed", "estimated", "unpriced"),
    *("prompt", "cached", "written", "hours", "completion", "images"),
)
TOKENS: Final = COUNTS[4:]
MONEY: Final = ("input", "cached_input", "cache_write", "output", "image", "saved")  # picodollars
NAMES: Final = (*COUNTS, *MONEY)
MILL: Final = 10**9  # picodollars
DAY_MS: Final = 86_400_000
LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999: the last time of `datetime`

_INDEX: Final = {name: at for at, name in enumerate(NAMES)}
_FOREVER: Final = LAST_MS + 1


@dataclass(frozen=True, slots=True)
class Period:
    """A period in Unix milliseconds. until_ms: its exclusive end; None: no end."""

    since_ms: int
    until_ms: int | None = None

    def parts(self) -> Iterator[tuple[int, int]]:
        """The incomplete days at both ends."""
        until = _FOREVER if self.until_ms is None else self.until_ms
        first, last = self._days()
        if first > last:  # within one day
            yield self.since_ms, until
            return
        for begin, end in ((self.since_ms, first), (last, until)):
            if begin < end:
                yield begin, end

    def whole_days(self) -> tuple[int, int] | None:
        """Begin of the first whole day, and end of the last one."""
        first, last = self._days()
        return (first, last) if first < last else None

    def _days(self) -> tuple[int, int]:
        until = _FOREVER if self.until_ms is None else self.until_ms
        return -(-self.since_ms // DAY_MS) * DAY_MS, until // DAY_MS * DAY_MS


@dataclass(frozen=True, slots=True)
class UsageSums:
    """Sums of a group; whole numbers, money in picodollars. names: of the group, in the requested order."""

    names: tuple[str, ...]
    values: tuple[int, ...]

    def __getitem__(self, name: str) -> int:
        """The sum with one of NAMES."""
        return self.values[_INDEX[name]]

    @property
    def cost(self) -> int:
        """The cost in picodollars."""
        return sum(self[name] for name in MONEY if name != "saved")


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Result of a query. groups: by day if requested, then the most expensive first. incomplete: (day, rows, requests) of
    incomplete days whose rows were removed in part. further: number of groups that are summed up as one, `other`.
    """

    groups: list[UsageSums]
    incomplete: list[tuple[str, int, int]]
    further: int = 0


def total(groups: Sequence[UsageSums]) -> UsageSums:
    return UsageSums((), tuple(sum(each.values[at] for each in groups) for at in range(len(NAMES))))
