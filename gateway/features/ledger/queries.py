"""Sums of a period by group: from the daily sums for whole days, from rows for the incomplete days at both ends.

    since                                          until
      ├─ rows ─┤ day │ day │ day │ day ├─── rows ───┤
               └────── daily sums ─────┘

The rows of an incomplete day may have been removed: then its sums are too small, and the day is reported as incomplete. By one
of ROW_GROUP, all days are summed up from rows, and of more than MOST_GROUPS groups, of which clients may make any number, only
the most expensive ones are returned. The others are one group, whose names are all OTHER.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, func, literal_column, select

from gateway.features.ledger.batches import day_of
from gateway.features.ledger.sums import (
    COUNTS,
    DAY_MS,
    LAST_MS,
    MILL,
    MONEY,
    NAMES,
    ROW_GROUP,
    TOKENS,
    Period,
    UsageReport,
    UsageSums,
)
from gateway.features.ledger.tables import daily, rows
from gateway.telemetry.counters import OTHER

# Literals: Postgres does not recognise two equal parameters of one query.
_MILL: Final[ColumnElement[Any]] = literal_column(str(MILL))
_DAY_MS: Final[ColumnElement[Any]] = literal_column(str(DAY_MS))
MOST_GROUPS: Final = 20_000
_EPOCH: Final = datetime.date(1970, 1, 1).toordinal()


def usage(connection: Connection, by: Sequence[str], period: Period, most: int = MOST_GROUPS) -> UsageReport:
    """Sum up a period. by: names of GROUP and ROW_GROUP. most: groups of rows."""
    found = dict[tuple[str, ...], list[int]]()
    incomplete = list[tuple[str, int, int]]()
    of_rows, days = not set(by).isdisjoint(ROW_GROUP), period.whole_days()
    further = 0
    if of_rows:
        further = _add_most_expensive(found, connection, by, period, most)
    if days and of_rows:
        incomplete += _incomplete_days(connection, *days)
    elif days:
        _add(found, connection, _of_days(by, *days), by)
    for begin, end in period.parts():
        if not of_rows:
            _add(found, connection, _of_rows(by, begin, end), by)
        incomplete += _incomplete(connection, begin)
    groups = [UsageSums(names, tuple(values)) for names, values in found.items() if values[0]]
    groups.sort(key=lambda each: (-each.cost, -each["requests"], each.names))
    if "day" in by:
        groups.sort(key=lambda each: each.names[by.index("day")])
    return UsageReport(groups, incomplete, further)


def _add_most_expensive(
    found: dict[tuple[str, ...], list[int]], connection: Connection, by: Sequence[str], period: Period, most: int
) -> int:
    """Add the groups of rows. Returns the number of groups in OTHER."""
    within = period.since_ms, period.until_ms or LAST_MS + 1
    cost = func.sum(sum((1.0 * rows.c[name] for name in MONEY if name != "saved"), literal_column("0.0")))  # no overflow
    query = _of_rows(by, *within)
    _add(found, connection, query.order_by(cost.desc(), func.count().desc()).limit(most), by)
    if len(found) < most:
        return 0
    groups = int(connection.execute(select(func.count()).select_from(query.subquery())).scalar() or 0)
    whole = dict[tuple[str, ...], list[int]]()
    _add(whole, connection, _of_rows((), *within), ())
    shown = [sum(values) for values in zip(*found.values(), strict=True)]
    rest = [one - other for one, other in zip(whole[()], shown, strict=True)]
    if groups > most:
        other = (OTHER,) * len(by)
        found[other] = [one + more for one, more in zip(found.get(other, [0] * len(NAMES)), rest, strict=True)]
    return groups - most


def _of_days(by: Sequence[str], first_ms: int, last_ms: int) -> Select[Any]:
    sums = [func.sum(daily.c[name]) for name in COUNTS]
    sums += [func.sum(daily.c[f"{name}_{part}"]) for name in MONEY for part in ("mills", "pico")]
    within = daily.c.day >= day_of(first_ms)
    if last_ms <= LAST_MS:
        within = and_(within, daily.c.day < day_of(last_ms))
    return _grouped([daily.c[name] for name in by], sums, within)


def _of_rows(by: Sequence[str], begin_ms: int, end_ms: int) -> Select[Any]:
    counts: dict[str, Any] = {
        "requests": func.count(),
        "failed": func.sum(rows.c.failed),
        "estimated": func.count().filter(rows.c.estimated != ""),
        "unpriced": func.count().filter(rows.c.metered > rows.c.priced),
    }
    sums = [*counts.values(), *(func.sum(rows.c[name]) for name in TOKENS)]
    for name in MONEY:  # each part rounds towards zero, in both databases
        sums += [func.sum(rows.c[name].op("/")(_MILL)), func.sum(rows.c[name].op("%")(_MILL))]
    day = rows.c.at_ms.op("/")(_DAY_MS)
    names: list[ColumnElement[Any]] = [day if name == "day" else rows.c[name] for name in by]
    return _grouped(names, sums, and_(rows.c.at_ms >= begin_ms, rows.c.at_ms < end_ms))


def _grouped(names: Sequence[ColumnElement[Any]], sums: Sequence[Any], within: Any) -> Select[Any]:
    labeled = [name.label(f"by_{at}") for at, name in enumerate(names)]
    query = select(*labeled, *sums).where(within)
    return query.group_by(*labeled) if labeled else query


def _add(found: dict[tuple[str, ...], list[int]], connection: Connection, query: Select[Any], by: Sequence[str]) -> None:
    for row in connection.execute(query):
        names = tuple(day_of(each * DAY_MS) if isinstance(each, int) else str(each) for each in row[: len(by)])
        values = [int(each or 0) for each in row[len(by) :]]
        counts, money = values[: len(COUNTS)], values[len(COUNTS) :]
        amounts = [mills * MILL + pico for mills, pico in zip(money[::2], money[1::2], strict=True)]
        sums = found.setdefault(names, [0] * len(NAMES))
        found[names] = [one + other for one, other in zip(sums, [*counts, *amounts], strict=True)]


def _incomplete(connection: Connection, at_ms: int) -> Iterator[tuple[str, int, int]]:
    """Report the day of this time if some of its rows were removed. Rows are removed in the order of time."""
    begin, day = at_ms // DAY_MS * DAY_MS, day_of(at_ms)
    if connection.execute(select(rows.c.at_ms).where(rows.c.at_ms < at_ms).limit(1)).first() is not None:
        return
    requests = int(connection.execute(select(func.sum(daily.c.requests)).where(daily.c.day == day)).scalar() or 0)
    there = _rows_between(connection, begin, begin + DAY_MS)
    if there < requests:
        yield day, there, requests


def _incomplete_days(connection: Connection, first_ms: int, last_ms: int) -> Iterator[tuple[str, int, int]]:
    """Report the whole days of which rows were removed: all before the oldest row, and perhaps its own."""
    within = and_(daily.c.day >= day_of(first_ms), daily.c.day < day_of(min(last_ms, LAST_MS)))
    oldest = connection.execute(select(func.min(rows.c.at_ms))).scalar()
    if oldest is not None:
        within = and_(within, daily.c.day <= day_of(oldest))
    query = select(daily.c.day, func.sum(daily.c.requests)).where(within).group_by(daily.c.day).order_by(daily.c.day)
    for day, requests in connection.execute(query).all():
        begin = (datetime.date.fromisoformat(day).toordinal() - _EPOCH) * DAY_MS
        there = _rows_between(connection, begin, begin + DAY_MS)
        if there < int(requests):
            yield day, there, int(requests)


def _rows_between(connection: Connection, begin_ms: int, end_ms: int) -> int:
    query = select(func.count()).where(rows.c.at_ms >= begin_ms, rows.c.at_ms < end_ms)
    return connection.execute(query).scalar() or 0
