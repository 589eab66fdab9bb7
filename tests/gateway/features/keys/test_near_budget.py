"""Budgets that are nearly spent: a metric and a line in the log, once in a day and once in a month."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.account import KeyLimits
from gateway.features.keys.limits.calendar import day_number
from gateway.features.keys.limits.limiter import Limiter, Moment, NearBudget
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import KeySettings
from gateway.features.keys.store import open_key_store
from tests.gateway.features.keys.test_keys import gateway

LINE = "a key has nearly spent its budget"
DAY = day_number(2026, 11, 29)


def moment(day: int = DAY) -> Moment:
    return Moment(0.0, day, 1.0, 1.0)


def spend(limiter: Limiter, limits: KeyLimits, amount: int, day: int = DAY) -> list[NearBudget]:
    limiter.enter("k", limits, moment(day)).settle(0, 0, amount, moment(day))
    return limiter.near_budgets(moment(day))


def test_a_budget_is_reported_from_four_fifths_on_and_once_in_its_period() -> None:
    limits = KeyLimits(day=100, month=1000)
    limiter = Limiter(limits_of=lambda _id: limits)
    assert spend(limiter, limits, 79) == []
    assert spend(limiter, limits, 1) == [NearBudget("k", "day", 80, 100)]
    assert spend(limiter, limits, 5) == []
    assert spend(limiter, limits, 75, DAY + 31) == [], "a new day, in a new month"
    assert spend(limiter, limits, 10, DAY + 31) == [NearBudget("k", "day", 85, 100)]


def test_a_month_has_its_own_report() -> None:
    limits = KeyLimits(month=100)
    limiter = Limiter(limits_of=lambda _id: limits)
    assert spend(limiter, limits, 50, DAY - 2) == []
    assert spend(limiter, limits, 40, DAY - 1) == [NearBudget("k", "month", 90, 100)]
    assert spend(limiter, limits, 5, DAY) == []


def test_the_spending_of_another_process_is_looked_at_and_a_raised_budget_counts() -> None:
    limits = KeyLimits(day=100, credited=[(DAY, 100)])
    limiter = Limiter(2, lambda _id: limits)
    assert spend(limiter, limits, 90) == []
    limiter.merge("other", [("k", 1, 1, 0, ((DAY, 75),))], 0.0)
    assert limiter.near_budgets(moment()) == [NearBudget("k", "day", 165, 200)]


def test_a_key_without_a_budget_costs_nothing() -> None:
    limits = KeyLimits(requests=10)
    limiter = Limiter(limits_of=lambda _id: limits)
    assert spend(limiter, limits, 10**12) == []
    assert limiter._spending == {}


async def test_of_several_gateways_and_after_a_restart_one_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.sqlite"
    store = await open_key_store(f"sqlite:///{file}", lambda: 0.0)
    key, _ = await store.create(KeySettings("acme", budget_usd_day=1.0))
    await store.close()
    caplog.set_level(logging.WARNING, "warmroute.keys")
    warned = 0.0
    for _round in range(2):  # the second one: after a restart of both
        both = [gateway(file)[0] for _ in range(2)]
        for keys in both:
            await keys.refresh()
            await keys.poll()
        for keys in both:
            grant = keys.ring.grant(key.id)
            assert grant is not None
            assert grant.limits is not None
            keys.limiter.enter(key.id, grant.limits, keys.moment()).settle(0, 0, 4 * 10**11, keys.moment())
            await keys.poll()
        await both[0].poll()
        await asyncio.gather(*[keys.warn_of_budgets() for keys in both])
        warned += sum(metrics_of(keys).near_budget.values.get(("day",), 0) for keys in both)
        for keys in both:
            await keys.close()
    assert warned == 1
    (line,) = [each for each in caplog.records if each.message == LINE]
    assert (line.key, line.tenant, line.period, line.spent_usd, line.budget_usd) == (key.id, "acme", "day", 0.8, 1.0)  # type: ignore[attr-defined]


def metrics_of(keys: Keys) -> KeyMetrics:
    return keys._metrics
