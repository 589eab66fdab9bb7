"""The latest requests of this process, for watchers (the live page), recorded only while somebody watches.

A watcher asks about every second (`page`) with the version of its last row, and gets the new and changed rows. The first
question starts the watch. QUIET_S after the last one it ends, and everything is freed. Without a watch a request costs one
comparison.

    chosen ──► `number` ──► put: a running row, and the reasons of its decision ──► ended: put again, with the same number

A row has a permanent number, and a version that grows with each change of any row. The rows are ordered by version, so a page
is the end of the table. Bounds: MAX_ROWS, the oldest change is dropped first; RATE_PER_S new rows a second, with a burst of
BURST. Further requests are counted (`hidden`) but get no row. Texts are cut by the caller. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

QUIET_S: Final = 30.0  # a watch ends after this time without a question
MAX_ROWS: Final = 400
RATE_PER_S: Final = 40.0  # new rows
BURST: Final = 80.0  # rows
PAGE_ROWS: Final = 200  # per answer

Row = dict[str, Any]
"""A request in the format of docs/ui.md."""

Reasons = Callable[[], Row]


class FeedRow:
    """A row with its version. reasons: returns why its replica was chosen; None: unknown."""

    __slots__ = ("reasons", "row", "version")

    def __init__(self, version: int, row: Row, reasons: Reasons | None) -> None:
        self.version = version
        self.row = row
        self.reasons = reasons


class Feed:
    """`begin` and `end` are called when a watch starts and ends.

    on: a watch runs. ring: the id of this watch of this process, "" without one. ended, hidden: requests that have ended since
    it started, and requests without a row.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.begin: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing
        self.on = False
        self.ring = ""
        self.ended = 0
        self.hidden = 0
        self._new_id = new_id
        self._rows: OrderedDict[int, FeedRow] = OrderedDict()  # by number, in the order of versions
        self._number = 0  # of the last row; continues in the next watch
        self._number_before = 0  # of the last row of earlier watches
        self._version = 0  # of the latest change
        self._asked_at = 0.0
        self._tokens = BURST  # of a token bucket: new rows permitted now
        self._filled_at = 0.0

    # -- called for requests

    def number(self, now: float) -> int:
        """The number of a new row. 0: the rate is exceeded, and it gets no row. O(1)."""
        self._tokens = min(BURST, self._tokens + max(0.0, now - self._filled_at) * RATE_PER_S)
        self._filled_at = now
        if self._tokens < 1:
            self.hidden += 1
            return 0
        self._tokens -= 1
        self._number += 1
        return self._number

    def put(self, number: int, row: Row, reasons: Reasons | None = None) -> None:
        """Adds or replaces a row. reasons: None: unchanged. O(1)."""
        if not self._number_before < number <= self._number:
            return  # a row of an earlier watch
        known = self._rows.pop(number, None)
        self._version += 1
        kept = reasons if reasons is not None or known is None else known.reasons
        self._rows[number] = FeedRow(self._version, row, kept)
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)

    # -- called for watchers

    def page(self, cursors: dict[str, int], now: float) -> Row:
        """The rows that changed since the watcher's cursor, at most the latest PAGE_ROWS. cursors: by ring. O(rows)."""
        if not self.on:
            self.on, self.ring = True, self._new_id()
            self.begin()
        self._asked_at = now
        after = cursors.get(self.ring, 0)
        rows: list[Row] = []
        for number in reversed(self._rows):
            shown = self._rows[number]
            if shown.version <= after or len(rows) == PAGE_ROWS:
                break
            rows.append({"key": f"{self.ring}:{number}", **shown.row})
        rows.reverse()
        return {"ring": self.ring, "last": self._version, "rows": rows, "ended": self.ended, "hidden": self.hidden}

    def explain(self, key: str) -> Row | None:
        """A row with the reasons for its replica. None: there is no such row. O(1)."""
        ring, _, number = key.partition(":")
        if ring != self.ring or not ring or not (number.isascii() and number.isdecimal() and len(number) < 19):
            return None
        shown = self._rows.get(int(number))
        if shown is None:
            return None
        reasons = shown.reasons
        return {"request": {"key": key, **shown.row}, "decision": None if reasons is None else reasons()}

    def sweep(self, now: float) -> None:
        """Ends a watch without questions. To be called about every second."""
        if self.on and now - self._asked_at > QUIET_S:
            self.on, self.ring = False, ""
            self.end()
            self._rows.clear()
            self.ended = self.hidden = self._version = 0
            self._number_before, self._tokens = self._number, BURST

    def check(self) -> None:
        """Raises AssertionError if a bound is exceeded. O(rows)."""
        assert len(self._rows) <= MAX_ROWS
        versions = [shown.version for shown in self._rows.values()]
        assert versions == sorted(set(versions))
        assert all(self._number_before < number <= self._number for number in self._rows)
        assert self.on or not self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<Feed {self.ring or 'off'}, {len(self._rows)} rows>"


def _nothing() -> None:
    """Default for `begin` and `end`."""
