"""Clients, replicas and keys choose names; the number of series does not follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from gateway.features.keys.metrics import KeyMetrics
from gateway.features.savings.counterfactual import POLICIES
from gateway.features.savings.metrics import SavingsMetrics
from gateway.features.savings.savings import Savings
from gateway.features.table import new_metrics
from gateway.telemetry.counters import MAX_LABEL_SETS, UNBOUNDED_LABELS, Gauge, Histogram
from gateway.telemetry.metrics import TENANTS, Metrics
from tests.gateway.conftest import BODY, running
from tests.gateway.features.keys.conftest import bearer, keyed, made
from tests.support.fakes import FakeReplica, answers

FLOOD: Final = 300  # names of each kind: more than there may be tenants
# Labels whose values are a table's, an operator's, or folded into classes.
OF_OURS: Final = {
    *("cache", "code", "compiled", "endpoint", "fault", "finding", "kind", "policy", "pool", "python", "reason"),
    *("replica", "period", "result", "source", "status", "tier", "to", "version", "way", "what", "workflow"),
}


def series(metrics: Metrics) -> dict[str, int]:
    """Without instruments that have no labels: some are set when their feature first works, and they have one series."""
    return {each.name: len(each.values) for each in metrics.instruments.all if each.labels}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in after.items() if count > before[name]}


def test_every_label_is_bounded_by_a_table_or_by_folding() -> None:
    """A new label has to be put into one of both."""
    for each in new_metrics().instruments.all:
        assert set(each.labels) <= OF_OURS | UNBOUNDED_LABELS, each.name
        assert not (isinstance(each, Gauge) and UNBOUNDED_LABELS & set(each.labels)), "gauges are not folded"


@pytest.mark.parametrize("name", [each.name for each in new_metrics().instruments.all if UNBOUNDED_LABELS & set(each.labels)])
def test_what_clients_choose_is_folded_and_nothing_is_lost(name: str) -> None:
    (each,) = [each for each in new_metrics().instruments.all if each.name == name]
    assert not isinstance(each, Gauge)
    count = MAX_LABEL_SETS + 500
    for number in range(count):
        labels = tuple(f"{label}-{number}" if label in UNBOUNDED_LABELS else label for label in each.labels)
        if isinstance(each, Histogram):
            each.observe(labels, 1.0)
        else:
            each.add(labels, 1)
    assert len(each.values) == MAX_LABEL_SETS + 1
    values: list[Any] = list(each.values.values())
    assert sum(value if isinstance(value, float) else value[-1] for value in values) == count


async def test_a_flood_of_tenants_models_endpoints_and_replicas_answers_has_few_series(tmp_path: Path) -> None:
    """With money, estimates, a ledger and the comparison of policies."""
    replica = FakeReplica([answers(prompt=1000, completion=5, cached=None)])
    settings: dict[str, Any] = {
        "prices": {"m": {"input": 1.0, "output": 2.0}},
        "ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"},
        "routing": {"compare": True},
    }
    async with replica, running(replica, **settings) as run:
        metrics = run.gateway.metrics

        async def flood(begin: int) -> None:
            for number in range(begin, begin + FLOOD):
                named = {"User-Agent": f"agent-{number}", "Session-Id": f"s-{number}"}
                await run.post(headers={"x-tenant-id": f"t-{number}", **named})
                await run.post({**BODY, "model": f"m-{number}"})
                await run.post(BODY, f"/v1/{number}")

        await flood(0)
        first = series(metrics)
        await flood(FLOOD)
        assert grown(first, series(metrics)) == {}, "a further flood adds nothing"
    assert 0 < first["warmroute_cost_usd_total"] <= 3 * (TENANTS + 1)
    assert 0 < first["warmroute_estimated_cost_usd_total"] <= TENANTS + 1
    assert sum(first.values()) < 1000


async def test_a_flood_of_keys_that_are_none_has_a_series_for_each_reason(tmp_path: Path) -> None:
    prices = {"m": {"input": 1.0, "output": 1.0}}
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=prices) as run:
        metrics = run.gateway.metrics
        mine = [await made(run, tenant=f"t-{number}", requests_per_minute=1) for number in range(5)]
        for headers in ({}, *(bearer(key) for _, key in mine), bearer(mine[0][1]), bearer("wr-0")):
            await run.post(headers=headers)
        before = series(metrics)
        for number in range(FLOOD):
            await run.post(headers=bearer(f"wr-aaaaaaaa-{number}"))
            await run.post(headers=bearer(mine[number % 5][1]))
        assert grown(before, series(metrics)) == {}
        refused = metrics.of(KeyMetrics).refused.values
        assert refused[("unknown",)] == FLOOD + 1
        assert sum(metrics.of(KeyMetrics).limited.values.values()) >= FLOOD - 60


def test_savings_have_a_series_for_each_policy() -> None:
    metrics = new_metrics()
    savings = Savings(metrics.of(SavingsMetrics), lambda: 0.0)
    for number in range(1000):
        savings.add(number, number, [1.0] * len(POLICIES), 0.1, 5)
        savings.set_gauges()
    count = {name: number for name, number in series(metrics).items() if "saved" in name or "policy" in name}
    assert set(count.values()) <= {1, len(POLICIES) - 1, len(POLICIES) + 1}
