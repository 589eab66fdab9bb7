"""Sums of any period are those of the records in it."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.accounting.consumed import Consumption
from gateway.accounting.meter import Bill
from gateway.accounting.money import MOST
from gateway.dialects.usage import Usage
from gateway.features.ledger.queries import usage
from gateway.features.ledger.sums import DAY_MS, GROUP, ROW_GROUP, Period, UsageReport, total
from tests.gateway.features.ledger.conftest import DAY_S, NOON, Entries, maker, record, stored

FIRST = int((NOON - NOON % DAY_S) * 1000)  # a midnight
COUNT = 400


def events(seed: int) -> list[tuple[int, dict[str, Any]]]:
    """(moment, values of the record), over five days, some of them at midnight."""
    chance, found = random.Random(seed), []
    for _ in range(COUNT):
        at = FIRST + chance.choice(
            [chance.randrange(5 * DAY_MS), chance.randrange(5) * DAY_MS, chance.randrange(1, 6) * DAY_MS - 1]
        )
        values: dict[str, Any] = {name: chance.choice("ab") for name in ("tenant", "key", "pool")}
        values["label"] = chance.choice(["m", "n"])
        values["fields"] = chance.choice([None, {"trace_id": "t"}, {"run": "run_1", "workflow": "w"}])
        values |= {name: chance.choice(["", "a"]) for name in ("session", "agent", "parent", "client", "user_agent", "code")}
        values["status"] = chance.choice([200, 200, 500])
        values["consumed"] = Consumption(Usage(chance.randrange(9999), 5, 7, 1), 0, chance.choice(["", "cached"]))
        values["bill"] = chance.choice([None, Bill(chance.choice([1, MOST]), 2, 3, chance.randint(-MOST, MOST), 5, 6)])
        found.append((at, values))
    return found


def expected(
    found: list[tuple[int, dict[str, Any]]], by: tuple[str, ...], period: Period
) -> dict[tuple[str, ...], tuple[int, ...]]:
    sums = dict[tuple[str, ...], list[int]]()
    for at, values in found:
        if not (period.since_ms <= at and (period.until_ms is None or at < period.until_ms)):
            continue
        day = datetime.fromtimestamp(at / 1000, UTC).date().isoformat()
        names = {"run": "", "workflow": "", **values, **(values["fields"] or {})}
        names |= {"day": day, "model": values["label"], "endpoint": "/v1/chat/completions"}
        used, bill = values["consumed"].usage, values["bill"]
        row = [1, int(values["status"] == 500), int(values["consumed"].estimated != ""), int(bill is None)]
        row += [used.prompt, used.cached, used.written, used.hours, used.completion, 0]
        row += [bill.input, bill.cached_input, bill.cache_write, bill.output, bill.image, bill.saved] if bill else [0] * 6
        group = tuple(names[name] for name in by)
        sums[group] = [one + other for one, other in zip(sums.get(group, [0] * 16), row, strict=True)]
    return {group: tuple(row) for group, row in sums.items()}


@pytest.mark.parametrize("seed", range(2))
async def test_a_period_has_what_is_in_it(url: str, seed: int) -> None:
    found, chance = events(seed), random.Random(seed)
    entries, one = Entries(), maker(seed)
    async with stored(url) as (store, database):
        for at, values in found:
            entries.clock.now = at / 1000
            await store.write(one.batch(entries.of(record(**values)), NOON)) if at % 7 == 0 else entries.observe(
                record(**values)
            )
        while some := entries.ledger.buffer.take(100):
            await store.write(one.batch(some, NOON))
        for _ in range(30):
            moments = [
                FIRST
                + chance.choice([chance.randrange(6) * DAY_MS, chance.randrange(5 * DAY_MS), chance.choice(found)[0] - FIRST])
                for _ in range(2)
            ]
            since, until = sorted(moments)
            period = Period(since, chance.choice([until + 1, until + 1, None]))
            all_names = (*GROUP, *ROW_GROUP)
            by = tuple(chance.sample(all_names, chance.randrange(len(all_names) + 1)))
            answer = await database.read(lambda each, by=by, period=period: usage(each, by, period))  # type: ignore[misc]
            assert {group.names: group.values for group in answer.groups} == expected(found, by, period), (period, by)
            assert not answer.incomplete
            whole = total(answer.groups)
            assert whole.values == tuple(map(sum, zip(*expected(found, by, period).values(), strict=True))) or not answer.groups


async def test_rows_that_are_past_their_time_are_named(url: str) -> None:
    entries, one = Entries(FIRST / 1000), maker()
    async with stored(url) as (store, database):
        for hour in range(48):
            entries.clock.now = FIRST / 1000 + hour * 3600
            await store.write(one.batch(entries.of(record()), NOON))
        await store.purge(FIRST + 10 * 3_600_000, "2000-01-01")
        part = Period(FIRST + 6 * 3_600_000)
        answer = await database.read(lambda each: usage(each, (), part))
        assert [group["requests"] for group in answer.groups] == [48 - 10]
        assert answer.incomplete == [("2025-11-27", 14, 24)]
        later = Period(FIRST + 11 * 3_600_000)
        answer = await database.read(lambda each: usage(each, (), later))
        assert [group["requests"] for group in answer.groups] == [48 - 11]
        assert answer.incomplete == [], "what is missing is before it"
        answer = await database.read(lambda each: usage(each, (), Period(FIRST)))
        assert [group["requests"] for group in answer.groups] == [48]
        assert answer.incomplete == []
        answer = await database.read(lambda each: usage(each, ("workflow",), Period(FIRST, FIRST + 2 * DAY_MS)))
        assert [group["requests"] for group in answer.groups] == [48 - 10]
        assert answer.incomplete == [("2025-11-27", 14, 24)], "by workflow there are rows only"


async def test_of_too_many_groups_the_cheapest_are_one(url: str) -> None:
    """Clients may make any number of sessions; a session may also have the name of the group of the others."""
    entries, one = Entries(), maker()
    async with stored(url) as (store, database):
        costs = {"a": MOST, "b": MOST, "c": 3, "other": 9, "d": 2, "e": 1}
        records = [record(session=name, bill=Bill(cost, 0, 0, 1)) for name, cost in costs.items()]
        await store.write(one.batch(entries.of(*records, record(session="c", bill=None)), NOON))

        async def by(*names: str, most: int) -> UsageReport:
            return await database.read(lambda each: usage(each, names, Period(FIRST), most))

        whole = await by("session", most=6)
        assert (len(whole.groups), whole.further) == (6, 0)
        found = await by("session", "tenant", most=3)
        assert [group.names for group in found.groups] == [("a", "t"), ("b", "t"), ("other", "t"), ("other", "other")]
        assert [group["requests"] for group in found.groups] == [1, 1, 1, 4]
        assert (found.further, total(found.groups)) == (3, total(whole.groups))
        assert [group.names[0] for group in (await by("session", most=3)).groups] == ["a", "b", "other"], "both are one"
        assert (await by("tenant", most=1)).further == 0


async def test_an_empty_ledger_has_no_groups(url: str) -> None:
    async with stored(url) as (_, database):
        for by in ((), ("day", "tenant")):
            answer = await database.read(lambda each, by=by: usage(each, by, Period(FIRST + 5)))  # type: ignore[misc]
            assert answer.groups == []
            assert set(total(answer.groups).values) == {0}


async def test_the_dearest_come_first_and_days_in_order(url: str) -> None:
    entries, one = Entries(), maker()
    async with stored(url) as (store, database):
        for day in (2, 0, 1):
            entries.clock.now = NOON + day * DAY_S
            costs = {"a": 5, "b": 70, "c": 6}
            records = [record(tenant=name, bill=Bill(cost, 0, 0, 10**6)) for name, cost in costs.items()]
            await store.write(one.batch(entries.of(*records), NOON))
        answer = await database.read(lambda each: usage(each, ("tenant",), Period(0)))
        assert [group.names[0] for group in answer.groups] == ["b", "c", "a"]
        answer = await database.read(lambda each: usage(each, ("tenant", "day"), Period(0)))
        days = ["2025-11-27"] * 3 + ["2025-11-28"] * 3 + ["2025-11-29"] * 3
        assert [group.names for group in answer.groups] == list(zip("bca" * 3, days, strict=True))
