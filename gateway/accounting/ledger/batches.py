"""Entries as rows, with ids, and their sums by day: a batch, as it goes into the database. No database in here.

A batch has its ids before it is written for the first time and keeps them: a batch whose commit is in doubt can be written
again. An id is the time, chance and a number: the time (of the batch, in milliseconds, 12 hexadecimal digits) keeps rows that
are written together together, the chance (64 bits, of the process) keeps processes, gateways and restarts apart, the number
(10 digits) the rows of one process. So a clock that stands still or goes back makes no id twice. All ids of a batch are in one
range, which has no other ids.

What clients, replicas and clocks can choose is bounded here: texts lose their control characters, NUL and lone surrogates
(Postgres refuses those) and are cut; numbers are brought into their ranges. Tenants beyond MAX_TENANTS in a day are OTHER.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.accounting.ledger.buffer import Entry
from gateway.accounting.ledger.sums import DAY_MS, LAST_MS, MILL, MONEY, TOKENS
from gateway.accounting.money import MOST
from gateway.telemetry.counters import FirstValues

MAX_CHARS: Final = 200  # of a text
MAX_TENANTS: Final = 20_000  # in a day, of one process
MAX_COUNT: Final = 10**9  # of tokens, of images
_CLIENT_LEFT: Final = 499  # its client's doing, as a cancelled one: neither has failed
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()

Row = tuple[Any, ...]
"""In the order of the columns of `rows` (`tables.py`)."""
Group = tuple[str, ...]
"""day, tenant, key, model, pool, endpoint."""


class Batch:
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
        """The first and the last id."""
        return self._id(0), self._id(len(self.entries) - 1)

    def rows(self) -> list[Row]:
        """Made once. O(entries) then."""
        if not self._rows:
            self._rows = [self._maker.row(self._id(at), entry) for at, entry in enumerate(self.entries)]
        return self._rows

    def halves(self) -> list[Batch]:
        """The same entries under the same ids, as two batches; of a single one, none."""
        middle = len(self.entries) // 2
        parts = ((self.entries[:middle], self._first), (self.entries[middle:], self._first + middle))
        return [Batch(self._maker, some, self._prefix, first) for some, first in parts] if middle else []

    def _id(self, at: int) -> str:
        return f"{self._prefix}{self._first + at:010x}"

    def __repr__(self) -> str:
        return f"<Batch of {len(self.entries)}, from {self._id(0)}>"


class RowMaker:
    """Makes batches, one after the other, and their rows."""

    def __init__(self, chance: random.Random | None = None) -> None:
        """chance: default: the system's. It keeps the ids of processes apart."""
        self._process = f"{(chance or random.SystemRandom()).getrandbits(64):016x}"
        self._next = 0
        self._day = 0
        self._tenants = FirstValues(MAX_TENANTS)

    def batch(self, entries: list[Entry], now: float) -> Batch:
        """now: Unix seconds. The rows are made when they are asked for."""
        first, self._next = self._next, self._next + len(entries)
        return Batch(self, entries, f"{milliseconds(now):012x}{self._process}", first)

    def row(self, id_: str, entry: Entry) -> Row:
        """O(1)."""
        (at, request, tenant, key, label, model, alias, pool, replica, endpoint) = entry[:10]
        (status, stream, cancelled, resumed, attempts, error, seconds, first, predicted, available) = entry[10:20]
        consumed, bill = entry[20], entry[21]
        at_ms = milliseconds(at)
        failed = not cancelled and status != _CLIENT_LEFT and (status >= 400 or bool(error))
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
        return (
            *(id_, at_ms, clean(request), self._tenant(clean(tenant), at_ms), clean(key), clean(label)),
            *(clean(model), clean(alias), clean(pool), clean(replica), clean(endpoint)),
            *(status, int(failed), int(stream), int(cancelled), resumed, attempts, clean(error)),
            *(milliseconds(seconds), -1 if first is None else milliseconds(first)),
            *(_count(predicted), _count(available), int(consumed is not None), int(bill is not None), estimated),
            *tokens,
            *money,
        )

    def _tenant(self, tenant: str, at_ms: int) -> str:
        day = at_ms // DAY_MS
        if day != self._day:
            self._day, self._tenants = day, FirstValues(MAX_TENANTS)
        return self._tenants.label(tenant)


_NO_TOKENS: Final = (0,) * len(TOKENS)
_NO_MONEY: Final = (0,) * len(MONEY)


def clean(text: str) -> str:
    """At most MAX_CHARS printable characters. O(characters)."""
    text = text[:MAX_CHARS]
    return text if text.isprintable() else "".join([char if char.isprintable() else "?" for char in text])


def milliseconds(seconds: float) -> int:
    """From 0 to LAST_MS."""
    if not math.isfinite(seconds):
        return 0
    return int(min(max(seconds, 0.0) * 1000 + 0.5, LAST_MS))


def day_of(at_ms: int) -> str:
    """UTC's day: YYYY-MM-DD."""
    return datetime.date.fromordinal(_EPOCH + at_ms // DAY_MS).isoformat()


def sums_of(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """The sums of each group, in the order of the columns of `daily`, sorted by group: transactions that lock several groups
    do so in one order. O(rows).
    """
    sums = dict[Group, list[int]]()
    for row in rows:
        group = (day_of(row[1]), row[3], row[4], row[5], row[8], row[10])
        estimated, metered, priced = row[24] != "", row[22], row[23]
        counts = (1, row[12], int(estimated), int(metered and not priced), *row[25:])
        found = sums.get(group)
        sums[group] = list(counts) if found is None else [one + other for one, other in zip(found, counts, strict=True)]
    return [(*group, *counts[: -len(MONEY)], *_parts(counts[-len(MONEY) :])) for group, counts in sorted(sums.items())]


def _parts(amounts: Iterable[int]) -> list[int]:
    """Mills and picodollars of each."""
    return [part for amount in amounts for part in divmod(amount, MILL)]


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)
