"""Batches of ledger entries: rows with ids, and their sums by day. Without I/O.

A batch has its ids before the first write and keeps them, so a batch whose commit is in doubt can be written again. An id is a
time, a random part and a number. The time (of the batch, in milliseconds, 12 hexadecimal digits) keeps the rows of a batch
adjacent. The random part (64 bits) distinguishes processes, gateways and restarts; the number (10 digits) distinguishes the
rows of one process. So ids are unique even if the clock stands still or goes back. The ids of a batch are one range, without
ids of other batches.

Values from clients, replicas and clocks are bounded here. Texts lose control characters, NUL and lone surrogates (which
Postgres refuses) and are cut; numbers are clamped. Tenants beyond MAX_TENANTS in a day become OTHER.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from gateway.accounting.money import MOST
from gateway.errors import CLIENT_LEFT
from gateway.features.ledger.buffer import Entry
from gateway.features.ledger.sums import DAY_MS, LAST_MS, MILL, MONEY, ROW_GROUP, TOKENS
from gateway.telemetry.counters import FirstValues

MAX_CHARS: Final = 200  # of a text
MAX_TENANTS: Final = 20_000  # in a day, of one process
MAX_COUNT: Final = 10**9  # of tokens or images
_SOON_S: Final = 1e10  # earlier times are in range
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()

Row = tuple[Any, ...]
"""The values of a row, in the order of the columns of `rows` (`tables.py`)."""
Group = tuple[str, ...]
"""day, tenant, key, model, pool, endpoint."""


class LedgerBatch:
    """Entries with their ids. `rows` and `sums_of` may be called in a thread."""

    __slots__ = ("_first", "_maker", "_prefix", "_rows", "entries")

    def __init__(self, maker: RowMaker, entries: list[Entry], prefix: str, first: int) -> None:
        """prefix, first: of the ids."""
        self.entries = entries
        self._maker = maker
        self._prefix = prefix
        self._first = first
        self._rows: list[Row] = []

    @property
    def range(self) -> tuple[str, str]:
        """The first and last id."""
        return self._id(0), self._id(len(self.entries) - 1)

    def rows(self) -> list[Row]:
        """The rows; made at the first call, in O(entries)."""
        if not self._rows:
            self._rows = [self._maker.row(self._id(at), entry) for at, entry in enumerate(self.entries)]
        return self._rows

    def halves(self) -> list[LedgerBatch]:
        """Two batches of the same entries under the same ids; none if there is one entry."""
        middle = len(self.entries) // 2
        parts = ((self.entries[:middle], self._first), (self.entries[middle:], self._first + middle))
        return [LedgerBatch(self._maker, some, self._prefix, first) for some, first in parts] if middle else []

    def _id(self, at: int) -> str:
        return f"{self._prefix}{self._first + at:010x}"

    def __repr__(self) -> str:
        return f"<Batch of {len(self.entries)}, from {self._id(0)}>"


class RowMaker:
    """Maker of batches and their rows."""

    def __init__(self, chance: random.Random | None = None) -> None:
        """chance: source of the ids' random part; default: the system's."""
        self._process = f"{(chance or random.SystemRandom()).getrandbits(64):016x}"
        self._next = 0
        self._day = 0
        self._tenants = FirstValues(MAX_TENANTS)

    def batch(self, entries: list[Entry], now: float) -> LedgerBatch:
        """Make a batch. now: Unix seconds. Its rows are made later."""
        first, self._next = self._next, self._next + len(entries)
        return LedgerBatch(self, entries, f"{milliseconds(now):012x}{self._process}", first)

    def row(self, id_: str, entry: Entry) -> Row:
        """Make the row of an entry. O(1)."""
        (at, request, tenant, key, label, model, alias, pool, replica, endpoint, *others) = entry
        (status, stream, cancelled, resumed, attempts, error, seconds, first, *spent) = others
        (predicted, available, consumed, bill, run, workflow, session, agent, parent, client, user_agent, code, _) = spent
        at_ms = milliseconds(at)
        failed = not cancelled and status != CLIENT_LEFT and (status >= 400 or bool(error))
        tokens: tuple[int, ...] = _NO_TOKENS
        money: tuple[int, ...] = _NO_MONEY
        estimated = ""
        if consumed is not None:
            usage, estimated = consumed.usage, consumed.estimated
            tokens = (usage.prompt, usage.cached or 0, usage.written, usage.hours, usage.completion, consumed.images)
            if not 0 <= min(tokens) <= max(tokens) <= MAX_COUNT:
                tokens = tuple([min(max(number, 0), MAX_COUNT) for number in tokens])
        if bill is not None:
            money = (bill.input, bill.cached_input, bill.cache_write, bill.output, bill.image, bill.saved)
            if not -MOST <= min(money) <= max(money) <= MOST:
                money = tuple([min(max(amount, -MOST), MOST) for amount in money])
        named = (_name(key), _name(label), _name(model), _name(alias), _name(pool), _name(replica), _name(endpoint))
        found = (status, int(failed), int(stream), int(cancelled), resumed, attempts, clean(error) if error else "")
        times = (milliseconds(seconds), -1 if first is None else milliseconds(first))
        counts = (_count(predicted), _count(available), int(consumed is not None), int(bill is not None), estimated)
        begin = (id_, at_ms, clean(request), self._tenant(_name(tenant), at_ms))
        sender = (clean(session), clean(agent), clean(parent), _name(client), _name(user_agent), _name(code))
        return begin + named + found + times + counts + tokens + money + (clean(run), _name(workflow)) + sender

    def _tenant(self, tenant: str, at_ms: int) -> str:
        day = at_ms // DAY_MS
        if day != self._day:
            self._day, self._tenants = day, FirstValues(MAX_TENANTS)
        return self._tenants.label(tenant)


# Places in a row.
_AT_MS, _TENANT, _KEY, _MODEL, _POOL, _ENDPOINT, _FAILED = 1, 3, 4, 5, 8, 10, 12
_METERED, _PRICED, _ESTIMATED, _TOKENS = 22, 23, 24, 25  # _TOKENS: tokens and money begin here, and end before ROW_GROUP

_NO_TOKENS: Final = (0,) * len(TOKENS)
_NO_MONEY: Final = (0,) * len(MONEY)


def clean(text: str) -> str:
    """The first MAX_CHARS characters, with "?" for unprintable ones. O(characters)."""
    text = text[:MAX_CHARS]
    return text if text.isprintable() else "".join([char if char.isprintable() else "?" for char in text])


_name = lru_cache(4096)(clean)  # names are few and repeat


def milliseconds(seconds: float) -> int:
    """Seconds as milliseconds, from 0 to LAST_MS."""
    if 0.0 <= seconds < _SOON_S:
        return int(seconds * 1000 + 0.5)
    if not math.isfinite(seconds):
        return 0
    return int(min(max(seconds, 0.0) * 1000 + 0.5, LAST_MS))


def day_of(at_ms: int) -> str:
    """The UTC day: YYYY-MM-DD."""
    return _day(at_ms // DAY_MS)


@lru_cache(16)
def _day(number: int) -> str:
    return datetime.date.fromordinal(_EPOCH + number).isoformat()


def sums_of(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Sum up rows by group: values in the order of the columns of `daily`, sorted by group so that all transactions lock groups
    in the same order. O(rows).
    """
    groups = dict[Group, list[Row]]()
    for row in rows:
        key = (day_of(row[_AT_MS]), row[_TENANT], row[_KEY], row[_MODEL], row[_POOL], row[_ENDPOINT])
        groups.setdefault(key, []).append(row)
    found = []
    for group, some in sorted(groups.items()):
        columns = list(zip(*some, strict=True))
        estimated = sum(each != "" for each in columns[_ESTIMATED])
        unpriced = sum(metered > priced for metered, priced in zip(columns[_METERED], columns[_PRICED], strict=True))
        amounts = map(sum, columns[_TOKENS : -len(ROW_GROUP)])
        counts = [len(some), sum(columns[_FAILED]), estimated, unpriced, *amounts]
        found.append((*group, *counts[: -len(MONEY)], *_parts(counts[-len(MONEY) :])))
    return found


def _parts(amounts: Iterable[int]) -> list[int]:
    """Split each amount into mills and picodollars."""
    return [part for amount in amounts for part in divmod(amount, MILL)]


def _count(number: int) -> int:
    return number if 0 <= number <= MAX_COUNT else min(max(number, 0), MAX_COUNT)
