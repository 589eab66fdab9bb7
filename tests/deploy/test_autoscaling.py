"""Autoscaling in the chart: what is scaled, and what the queries come to, by promtool."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from gateway.features.sharing.metrics import SharingMetrics
from gateway.features.table import new_metrics
from tests.deploy.helm import ONE_REPLICA, Helm, Objects, changed, validate
from tests.deploy.test_alerts import checked
from tests.gateway.conftest import eventually
from tests.gateway.features.sharing.conftest import sharing
from tests.support.fakes import FakeReplica, hangs
from tests.support.paths import ROOT
from tests.support.redis import RedisServer, serving

pytestmark = pytest.mark.tools

KEDA: Mapping[str, Any] = {"serverAddress": "http://prometheus:9090"}
ENABLED: Mapping[str, Any] = {"enabled": True}
GATEWAY: Mapping[str, Any] = {**ONE_REPLICA, "autoscaling": ENABLED, "keda": KEDA}
REPLICAS: Mapping[str, Any] = {
    "replicas": {"enabled": True, "engine": "sim", "model": "m", "autoscaling": ENABLED},
    "keda": KEDA,
}
OF_KEDA = changed(GATEWAY, "autoscaling.type", "keda")
OF_HPA = changed(REPLICAS, "replicas.autoscaling.type", "hpa")
TARGETS = {"Deployment": "Deployment", "StatefulSet": "StatefulSet of replicas"}


@pytest.mark.parametrize("values", [GATEWAY, OF_KEDA, REPLICAS, OF_HPA])
def test_who_scales_is_the_only_one_to_say_how_many_there_are(helm: Helm, values: Mapping[str, Any]) -> None:
    objects = helm.objects(values)
    for item in objects.values():
        validate(item)
    (scaler,) = (item for item in objects.values() if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"))
    target = scaler["spec"]["scaleTargetRef"]
    scaled = objects[TARGETS[target["kind"]]]
    assert (target["name"], target["apiVersion"]) == (scaled["metadata"]["name"], scaled["apiVersion"])
    assert "replicas" not in scaled["spec"]


def test_gateways_are_scaled_by_the_cpu_that_they_have_asked_for(helm: Helm) -> None:
    more = {"type": "Pods", "pods": {"metric": {"name": "x"}, "target": {"type": "AverageValue", "averageValue": "1"}}}
    spec = helm.objects(changed(GATEWAY, "autoscaling.metrics", [more]))["HorizontalPodAutoscaler"]["spec"]
    cpu, last = spec["metrics"]
    assert cpu["containerResource"] == {
        "name": "cpu",
        "container": "gateway",  # not that of sidecars
        "target": {"type": "Utilization", "averageUtilization": 70},
    }
    assert last == more
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600


def triggers(objects: Objects, kind: str) -> Sequence[tuple[str, float]]:
    """The queries of a ScaledObject, with their thresholds."""
    found = [each for each in objects[kind]["spec"]["triggers"] if each["type"] == "prometheus"]
    for each in found:
        assert each["metricType"] == "AverageValue", "the value over the threshold is the number of pods"
        assert each["metadata"]["serverAddress"] == KEDA["serverAddress"]
    return [(each["metadata"]["query"], float(each["metadata"]["threshold"])) for each in found]


def series(service: str, pod: str, **values: float) -> list[dict[str, str]]:
    """Of one pod, whose pool is `default`, as the ServiceMonitor labels them."""
    labels = f'namespace="llm",service="{service}",pod="{pod}",instance="{pod}:8002"'
    pool = {name: ',pool="default"' if name.startswith("pool_") else "" for name in values}
    return [{"series": f"warmroute_{name}{{{labels}{pool[name]}}}", "values": f"{value}x10"} for name, value in values.items()]


def evaluated(query: str, given: Sequence[Mapping[str, str]], value: float, folder: Path) -> None:
    """Fails unless the query comes to this value."""
    expression = {"expr": query, "eval_time": "5m", "exp_samples": [{"value": value}]}
    checked("", [{"interval": "1m", "input_series": list(given), "promql_expr_test": [expression]}], folder)


FULL: Mapping[str, float] = {
    "pool_inflight": 100.0,
    "pool_inflight_limit": 4096.0,
    "client_connections": 500.0,
    "client_connections_limit": 1000.0,
    "inflight_bytes": 1.0,
    "inflight_limit_bytes": 1024.0,
}


def test_a_gateway_is_as_full_as_what_of_it_is_fullest(helm: Helm, tmp_path: Path) -> None:
    objects = helm.objects(OF_KEDA)
    service = objects["MetricsService"]["metadata"]["name"]
    ((query, threshold),) = triggers(objects, "ScaledObject")
    busy = series(service, "a", **FULL) + series(service, "b", **{**FULL, "pool_inflight": 4096.0})
    other = series("another-metrics", "c", **FULL)
    evaluated(query, busy + other, 0.5 + 1.0, tmp_path)
    assert threshold == 0.7, "so three pods are wanted"
    cpu = objects["ScaledObject"]["spec"]["triggers"][0]
    assert (cpu["type"], cpu["metadata"]) == ("cpu", {"value": "70", "containerName": "gateway"})


def test_slots_that_all_gateways_have_together_ask_for_no_more_gateways(helm: Helm, tmp_path: Path) -> None:
    """`max_inflight` is for all gateways that share; one that has lost the store has it for itself."""
    objects = helm.objects(OF_KEDA)
    service = objects["MetricsService"]["metadata"]["name"]
    ((query, _),) = triggers(objects, "ScaledObject")
    full = {**FULL, "pool_inflight": 4096.0, "pool_slots_taken": 4096.0}
    shared = series(service, "a", **full, sharing_up=1.0) + series(service, "b", **full, sharing_up=1.0)
    evaluated(query, shared, 0.5 + 0.5, tmp_path)
    evaluated(query, shared + series(service, "c", **full, sharing_up=0.0), 0.5 + 0.5 + 1.0, tmp_path)


async def test_replicas_are_scaled_by_the_same_with_gateways_that_share(helm: Helm, tmp_path: Path) -> None:
    """Two that follow each other: each knows all that is booked, and their values are added up."""
    hold = asyncio.Event()
    objects = helm.objects(REPLICAS)
    service = objects["MetricsService"]["metadata"]["name"]
    (demand, _), (backlog, _) = triggers(objects, "ScaledObject of replicas")
    with serving(RedisServer(tmp_path)) as store:
        shared = {"sharing": {"url": store.url}}
        async with (
            FakeReplica([hangs(hold)] * 3) as replica,
            sharing(replica, **shared) as one,
            sharing(replica, **shared) as two,
        ):
            await eventually(
                lambda: all(run.gateway.metrics.of(SharingMetrics).gateways.values.get(()) == 1 for run in (one, two))
            )
            asking = [asyncio.create_task(run.post()) for run in (one, two, two)]
            loads = [run.gateway.router.ledger.of for run in (one, two)]
            await eventually(lambda: [of(replica.name).inflight for of in loads] == [3, 3])
            pages = {pod: await run.metrics() for pod, run in (("a", one), ("b", two))}
            booked_s = loads[0](replica.name).booked_tokens / loads[0](replica.name).rate.value
            hold.set()
            await asyncio.gather(*asking)
    given, seconds = [], []
    for pod, page in pages.items():
        values = {name: page[f'warmroute_{name}{{pool="default"}}'] for name in OF_DEMAND}
        given += series(service, pod, **values)
        seconds.append(values["pool_prefill_backlog_seconds"])
    evaluated(demand, given, 3, tmp_path)
    evaluated(backlog, given, sum(seconds), tmp_path)
    assert 0 < sum(seconds) <= booked_s, "once what is booked, less what is computed by now"


OF_DEMAND = ("pool_inflight", "pool_waiting", "pool_prefill_backlog_seconds")


def test_replicas_are_scaled_by_what_is_asked_of_them(helm: Helm, tmp_path: Path) -> None:
    objects = helm.objects(REPLICAS)
    service = objects["MetricsService"]["metadata"]["name"]
    (demand, running), (backlog, seconds) = triggers(objects, "ScaledObject of replicas")
    given = series(service, "a", pool_inflight=40.0, pool_waiting=10.0, pool_prefill_backlog_seconds=2.5)
    given += series(service, "b", pool_inflight=30.0, pool_waiting=0.0, pool_prefill_backlog_seconds=0.5)
    given += series("another-metrics", "c", pool_inflight=99.0, pool_waiting=99.0, pool_prefill_backlog_seconds=99.0)
    evaluated(demand, given, 80, tmp_path)
    evaluated(backlog, given, 3, tmp_path)
    assert (running, seconds) == (32, 1), "80 requests need three replicas, and so do 3 s of prefill"


def test_a_pool_is_scaled_by_its_own_series(helm: Helm) -> None:
    pools = {"pools": [{"name": "near"}, {"name": "far", "replicas": ["http://far:1"], "models": ["x"]}]}
    objects = helm.objects({**changed(REPLICAS, "replicas.pool", "near"), "config": pools})
    assert all('pool="near"' in query for query, _ in triggers(objects, "ScaledObject of replicas"))
    chosen = changed(REPLICAS, "keda.selector", 'job="warmroute"')
    assert all('{job="warmroute",pool="default"}' in query for query, _ in triggers(helm.objects(chosen), OF_REPLICAS))


OF_REPLICAS = "ScaledObject of replicas"


def test_queries_name_metrics_that_the_gateway_has(helm: Helm) -> None:
    exposed = {instrument.name for instrument in new_metrics().instruments.all}
    for values, kind in ((OF_KEDA, "ScaledObject"), (REPLICAS, OF_REPLICAS)):
        for query, _ in triggers(helm.objects(values), kind):
            promql_parser.parse(query)  # raises
            assert (names := set(re.findall(r"\bwarmroute_\w+", query)))
            assert names <= exposed


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(OF_KEDA, "keda.serverAddress", ""), "keda.serverAddress is empty"),
        ({**GATEWAY, "resources": None}, "resources.requests.cpu is empty"),
        (changed(GATEWAY, "autoscaling.minReplicas", 9), "minReplicas (9) is above maxReplicas (4)"),
        (changed(REPLICAS, "replicas.autoscaling.minReplicas", 9), "minReplicas (9) is above maxReplicas (4)"),
    ],
)
def test_what_cannot_scale_is_refused(helm: Helm, values: Mapping[str, Any], message: str) -> None:
    assert message in helm.refusal(values)


def test_the_adapter_s_rules_give_the_metrics_that_the_chart_asks_for(helm: Helm, tmp_path: Path) -> None:
    """docs/kubernetes.md has them; their placeholders are filled in here as prometheus-adapter does."""
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    (rules,) = (
        block["rules"]["external"]
        for block in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
        if isinstance(block, dict) and "rules" in block
    )
    objects = helm.objects(OF_HPA)
    asked = [each["external"] for each in objects["HorizontalPodAutoscaler of replicas"]["spec"]["metrics"]]
    assert [each["metric"]["name"] for each in asked] == [rule["name"]["as"] for rule in rules]
    assert [each["target"]["averageValue"] for each in asked] == ["32", "1000m"]
    service = objects["MetricsService"]["metadata"]["name"]
    given = series(service, "a", pool_inflight=40.0, pool_waiting=10.0, pool_prefill_backlog_seconds=2.5)
    for each, rule, value in zip(asked, rules, (50, 2.5), strict=True):
        labels = {"namespace": "llm", **each["metric"]["selector"]["matchLabels"]}
        matchers = ",".join(f'{name}="{wanted}"' for name, wanted in labels.items())
        name, _, _ = rule["seriesQuery"].partition("{")
        evaluated(
            rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.LabelMatchers>>", matchers), given, value, tmp_path
        )
