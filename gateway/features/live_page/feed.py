"""The last requests of this process, for whoever watches them (the live page), and only while somebody does.

A watcher asks every second or so (`page`) with the version of the last row that it has, and gets the rows that are new or
have changed since. The first question begins the watch; QUIET_S after the last one it ends, and everything is freed. Who is not
watched pays one comparison a request.

    chosen ──► `number` ──► put: a row that runs, and the reasons of its decision ──► ended: put again, under the same number

A row has a number for good, and a version that grows with each change of any row: the order of versions is the order of the
table, so that a page is its end. Bounds: MAX_ROWS, the oldest change goes first; RATE_PER_S new rows a second, with a burst of
BURST, and requests beyond are counted (`hidden`) but have no row; texts are cut by whoever makes the rows. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

QUIET_S: Final = 30.0  # seconds without a question after which a watch ends
MAX_ROWS: Final = 400
RATE_PER_S: Final = 40.0  # new rows
BURST: Final = 80.0  # rows
PAGE_ROWS: Final = 200  # of an answer

Row = dict[str, Any]
"""A request, as docs/ui.md has it."""

Reasons = Callable[[], Row]


class FeedRow:
    """A row with its version, and why its replica was chosen: made into values if somebody asks. None: nobody chose."""

    __slots__ = ("reasons", "row", "version")

    def __init__(self, version: int, row: Row, reasons: Reasons | None) -> None:
        self.version = version
        self.row = row
        self.reasons = reasons


class Feed:
    """See the top of this file. `begin` and `end` are called when a watch does.

    on: somebody watches. ring: an id of this watch of this process, "" while there is none. ended, hidden: requests that have
    ended since it began, and requests that have got no row.
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
        self._number = 0  # of the last row; it goes on in the next watch
        self._former = 0  # of the last row of former watches
        self._version = 0  # of the last change
        self._asked_at = 0.0
        self._room = BURST  # rows that may be made at once
        self._filled_at = 0.0

    # -- the requests' side

    def number(self, now: float) -> int:
        """That of a new row; 0: there were too many within this second. O(1)."""
        self._room = min(BURST, self._room + max(0.0, now - self._filled_at) * RATE_PER_S)
        self._filled_at = now
        if self._room < 1:
            self.hidden += 1
            return 0
        self._room -= 1
        self._number += 1
        return self._number

    def put(self, number: int, row: Row, reasons: Reasons | None = None) -> None:
        """A row is new, or has changed. reasons: None: as they were. O(1)."""
        if not self._former < number <= self._number:
            return  # of an earlier watch
        known = self._rows.pop(number, None)
        self._version += 1
        kept = reasons if reasons is not None or known is None else known.reasons
        self._rows[number] = FeedRow(self._version, row, kept)
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)

    # -- the watchers' side

    def page(self, cursors: dict[str, int], now: float) -> Row:
        """The rows that have changed since a watcher's cursor, the newest PAGE_ROWS at most. cursors: of all rings. O(rows)."""
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
        """Why a request's replica was chosen, with its row; None: there is no such row here any more. O(1)."""
        ring, _, number = key.partition(":")
        if ring != self.ring or not ring or not (number.isascii() and number.isdecimal() and len(number) < 19):
            return None
        shown = self._rows.get(int(number))
        if shown is None:
            return None
        reasons = shown.reasons
        return {"request": {"key": key, **shown.row}, "decision": None if reasons is None else reasons()}

    def sweep(self, now: float) -> None:
        """End a watch that nobody asks for any more. To be called every second or so."""
        if self.on and now - self._asked_at > QUIET_S:
            self.on, self.ring = False, ""
            self.end()
            self._rows.clear()
            self.ended = self.hidden = self._version = 0
            self._former, self._room = self._number, BURST

    def check(self) -> None:
        """Raises AssertionError if a bound is broken. O(rows)."""
        assert len(self._rows) <= MAX_ROWS
        versions = [shown.version for shown in self._rows.values()]
        assert versions == sorted(set(versions))
        assert all(self._former < number <= self._number for number in self._rows)
        assert self.on or not self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<Feed {self.ring or 'off'}, {len(self._rows)} rows>"


def _nothing() -> None:
    """Nobody wants to know."""
