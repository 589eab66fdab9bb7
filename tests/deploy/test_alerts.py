"""Each alert of rules/warmroute.yaml fires on the series that it is meant for, and not on those that are well; each recorded
series has the value that it should have: by promtool.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from gateway.features.table import new_metrics
from scripts.dashboards.__main__ import BOARDS
from tests.support.tools import ROOT, tool

RULES = ROOT / "rules" / "warmroute.yaml"
HERE = {"namespace": "llm", "service": "gw-metrics"}

Series = Mapping[str, str]
"""Name and labels beside HERE -> values, a minute apart, as promtool writes them."""


@dataclass(frozen=True)
class Case:
    """fires, quiet: series. labels: of the alert, beside HERE and its severity. value: as its text has it. at: minutes."""

    fires: Series
    quiet: Series
    labels: Mapping[str, str] = field(default_factory=dict)
    value: str = ""
    at: int = 40
    here: Mapping[str, str] = field(default_factory=lambda: HERE)


def counts(per_minute: float) -> str:
    return f"0+{per_minute:g}x60"


def stays(value: float) -> str:
    return f"{value:g}x60"


def jumps(before: float, after: float) -> str:
    """A counter of USD: ten hours at one rate, three at another; both per hour."""
    return f"0+{before / 60:.9g}x600 {before * 10 + after / 60:.9g}+{after / 60:.9g}x180"


POOL, REPLICA, POD = {"pool": "p"}, {"replica": "r"}, {"pod": "gw-0"}
CASES: Mapping[str, Case] = {
    "WarmrouteDown": Case({"other{}": stays(1)}, {"warmroute_workers{}": stays(1)}, here={}),
    "WarmrouteNoReplica": Case(
        {'warmroute_pool_replicas_live{pool="p"}': stays(0)},
        # One of two pods has not probed it yet.
        {
            'warmroute_pool_replicas_live{pool="p",pod="a"}': stays(0),
            'warmroute_pool_replicas_live{pool="p",pod="b"}': stays(1),
        },
        POOL,
    ),
    "WarmrouteReplicaDown": Case(
        {'warmroute_replica_up{replica="r"}': stays(0)}, {'warmroute_replica_up{replica="r"}': "1x20 0x5 1x40"}, REPLICA
    ),
    "WarmrouteReplicaCircuitOpen": Case(
        {'warmroute_replica_circuit_open{replica="r"}': stays(1), 'warmroute_replica_up{replica="r"}': stays(1)},
        {
            'warmroute_replica_circuit_open{replica="r"}': "0x30 1x5 0x30",
            'warmroute_replica_up{replica="r"}': stays(1),
            # One that is down.
            'warmroute_replica_circuit_open{replica="s"}': stays(1),
            'warmroute_replica_up{replica="s"}': stays(0),
        },
        REPLICA,
    ),
    "WarmrouteReplicaHung": Case(
        {'warmroute_replica_hung{replica="r"}': stays(1)}, {'warmroute_replica_hung{replica="r"}': stays(0)}, REPLICA
    ),
    "WarmrouteErrors": Case(
        {'warmroute_requests_total{code="200"}': counts(90), 'warmroute_requests_total{code="502"}': counts(10)},
        {'warmroute_requests_total{code="200"}': counts(97), 'warmroute_requests_total{code="502"}': counts(3)},
        value="10%",
    ),
    "WarmrouteBrokenStreams": Case(
        {"warmroute_requests_total{}": counts(100), 'warmroute_broken_responses_total{replica="r"}': counts(2)},
        {"warmroute_requests_total{}": counts(1000), 'warmroute_broken_responses_total{replica="r"}': counts(2)},
        value="2%",
    ),
    "WarmrouteRetryBudgetExhausted": Case(
        {"warmroute_retry_budget_exhausted_total{}": counts(60)},
        {"warmroute_retry_budget_exhausted_total{}": stays(5)},
        value="1",
    ),
    "WarmrouteWorkerRestarts": Case(
        {"warmroute_worker_restarts_total{}": counts(1)}, {"warmroute_worker_restarts_total{}": "0x30 1x30"}, value="15"
    ),
    "WarmrouteDiscoveryDown": Case(
        {'warmroute_discovery_up{source="s",pod="gw-0"}': stays(0)},
        {'warmroute_discovery_up{source="s",pod="gw-0"}': "1x30 0x3 1x30"},
        {"source": "s", **POD},
    ),
    # One alone.
    "WarmrouteReloadInvalid": Case(
        {'warmroute_config_reloads_total{result="invalid",pod="gw-0"}': "0x30 1x30"},
        {'warmroute_config_reloads_total{result="good",pod="gw-0"}': counts(1)},
        POD,
    ),
    "WarmrouteCachedTokensGone": Case(
        {
            'warmroute_predicted_cached_tokens_total{model="m",replica="r"}': counts(60_000),
            'warmroute_prompt_tokens_total{model="m",replica="r",cache="miss"}': counts(60_000),
        },
        {
            'warmroute_predicted_cached_tokens_total{model="m",replica="r"}': counts(60_000),
            'warmroute_prompt_tokens_total{model="m",replica="r",cache="hit"}': counts(1),
        },
        {"model": "m"},
    ),
    "WarmrouteReplicaFinding": Case(
        {'warmroute_replica_finding{replica="r",finding="prompt_cut"}': stays(1)},
        {'warmroute_replica_finding{replica="r",finding="prompt_cut"}': stays(0)},
        {"replica": "r", "finding": "prompt_cut"},
    ),
    "WarmrouteCacheHitsMissing": Case(
        {'warmroute_replica_cache_hits_missing{replica="r"}': stays(1)},
        {'warmroute_replica_cache_hits_missing{replica="r"}': stays(0)},
        REPLICA,
    ),
    "WarmrouteQueueRefusals": Case(
        {'warmroute_admission_rejected_total{pool="p",reason="queue_full"}': counts(60)},
        {'warmroute_admission_rejected_total{pool="p",reason="queue_full"}': stays(7)},
        POOL,
        value="1",
    ),
    "WarmroutePoolSaturated": Case(
        # Two that share the slots, and one that does not: each says how full they are for it.
        {
            'warmroute_pool_slots_taken{pool="p",pod="a"}': stays(95),
            'warmroute_pool_inflight_limit{pool="p",pod="a"}': stays(100),
            'warmroute_pool_slots_taken{pool="p",pod="b"}': stays(95),
            'warmroute_pool_inflight_limit{pool="p",pod="b"}': stays(100),
        },
        {
            'warmroute_pool_slots_taken{pool="p",pod="a"}': stays(80),
            'warmroute_pool_inflight_limit{pool="p",pod="a"}': stays(100),
            'warmroute_pool_slots_taken{pool="p",pod="b"}': stays(80),
            'warmroute_pool_inflight_limit{pool="p",pod="b"}': stays(100),
        },
        POOL,
        value="95%",
    ),
    "WarmroutePrefillBacklog": Case(
        {
            'warmroute_pool_prefill_backlog_seconds{pool="p",pod="a"}': stays(20),
            'warmroute_pool_prefill_backlog_seconds{pool="p",pod="b"}': stays(10),
            'warmroute_pool_replicas_live{pool="p",pod="a"}': stays(2),
            'warmroute_pool_replicas_live{pool="p",pod="b"}': stays(2),
        },
        {'warmroute_pool_prefill_backlog_seconds{pool="p"}': stays(20), 'warmroute_pool_replicas_live{pool="p"}': stays(4)},
        POOL,
        value="15s",
    ),
    "WarmrouteMemoryFull": Case(
        {"warmroute_memory_rejected_total{}": counts(60)}, {"warmroute_memory_rejected_total{}": stays(1)}, value="1"
    ),
    "WarmrouteConnectionsFull": Case(
        {"warmroute_client_connections_rejected_total{}": counts(60)},
        {"warmroute_client_connections_rejected_total{}": stays(1)},
        value="1",
    ),
    "WarmrouteSharingDown": Case(
        {'warmroute_sharing_up{pod="gw-0"}': stays(0), 'warmroute_sharing_up{pod="gw-1"}': stays(1)},
        {'warmroute_sharing_up{pod="gw-0"}': "1x30 0x3 1x30"},
        POD,
    ),
    "WarmrouteSharingRefused": Case(
        {'warmroute_sharing_refused_total{reason="version",pod="gw-0"}': counts(60)},
        {'warmroute_sharing_refused_total{reason="version",pod="gw-0"}': "0x10 0+60x5 300x60"},  # a rolling update
        {"reason": "version"},
    ),
    "WarmrouteSharingDropped": Case(
        {'warmroute_sharing_dropped_total{pod="gw-0"}': counts(2)},
        {'warmroute_sharing_dropped_total{pod="gw-0"}': stays(7)},
        POD,
        value="30",
    ),
    "WarmrouteSharingApart": Case(
        {
            **{f'warmroute_sharing_gateways{{job="j",pod="gw-{pod}"}}': stays(seen) for pod, seen in enumerate((1, 2, 2))},
            **{f'warmroute_sharing_up{{job="j",pod="gw-{pod}"}}': stays(1) for pod in range(3)},
        },
        # One has lost the store, which is another alert; another sees more gateways than are scraped here.
        {
            **{f'warmroute_sharing_gateways{{job="j",pod="gw-{pod}"}}': stays(seen) for pod, seen in enumerate((1, 5, 0))},
            **{f'warmroute_sharing_up{{job="j",pod="gw-{pod}"}}': stays(up) for pod, up in enumerate((1, 1, 0))},
        },
        {"job": "j", **POD},
        value="1",
    ),
    "WarmrouteSharingUnknownReplicas": Case(
        {
            'warmroute_sharing_unknown_replicas_total{pod="a"}': counts(50),
            'warmroute_sharing_unknown_replicas_total{pod="b"}': counts(50),
            'warmroute_routing_decisions_total{pod="a",reason="warm"}': counts(50),
            'warmroute_routing_decisions_total{pod="b",reason="warm"}': counts(50),
        },
        {
            'warmroute_sharing_unknown_replicas_total{pod="a"}': counts(2),
            'warmroute_routing_decisions_total{pod="a",reason="warm"}': counts(50),
            'warmroute_routing_decisions_total{pod="b",reason="warm"}': counts(50),
        },
        value="50%",
    ),
    "WarmrouteSnapshotsNotWritten": Case(
        {
            'warmroute_snapshots_total{pod="gw-0",result="failed"}': counts(1),
            'warmroute_snapshots_total{pod="gw-0",result="good"}': stays(9),
        },
        {
            'warmroute_snapshots_total{pod="gw-0",result="failed"}': "0+1x35 35x30",
            'warmroute_snapshots_total{pod="gw-0",result="good"}': "0x35 0+1x30",
        },
        POD,
        value="30",
    ),
    "WarmrouteResponsesNotKept": Case(
        {'warmroute_responses_kept_total{result="failed"}': counts(60)},
        {'warmroute_responses_kept_total{result="kept"}': counts(60)},
        value="1",
    ),
    "WarmrouteStateFileLost": Case(
        {"warmroute_state_file_lost_total{}": "0x30 1x30"}, {"warmroute_state_file_lost_total{}": stays(0)}
    ),
    "WarmrouteLogLinesDropped": Case(
        {'warmroute_log_lines_dropped_total{pod="gw-0"}': counts(3)},
        {'warmroute_log_lines_dropped_total{pod="gw-0"}': stays(3)},
        POD,
        value="45",
    ),
    "WarmrouteLedgerDown": Case(
        {'warmroute_ledger_up{pod="gw-0"}': stays(0), 'warmroute_ledger_up{pod="gw-1"}': stays(1)},
        {'warmroute_ledger_up{pod="gw-0"}': "1x30 0x3 1x30"},
        POD,
    ),
    "WarmrouteUsageLost": Case(
        {'warmroute_ledger_dropped_total{pod="gw-0"}': counts(4)},
        {'warmroute_ledger_dropped_total{pod="gw-0"}': stays(4)},
        POD,
        value="60",
    ),
    "WarmrouteKeysDown": Case(
        {'warmroute_keys_up{pod="gw-0"}': stays(0)}, {'warmroute_keys_up{pod="gw-0"}': "1x30 0x3 1x30"}, POD
    ),
    "WarmrouteKeysRefused": Case(
        {
            'warmroute_keys_refused_total{reason="expired"}': counts(30),
            'warmroute_keys_refused_total{reason="revoked"}': counts(20),
            'warmroute_requests_total{code="200"}': counts(50),
            'warmroute_requests_total{code="401"}': counts(50),
        },
        {
            'warmroute_keys_refused_total{reason="missing"}': counts(5),
            'warmroute_requests_total{code="200"}': counts(95),
            'warmroute_requests_total{code="401"}': counts(5),
        },
        value="50%",
    ),
    "WarmrouteModelWithoutPrice": Case(
        {'warmroute_unpriced_answers_total{model="m"}': counts(60)},
        {'warmroute_unpriced_answers_total{model="m"}': stays(60)},
        {"model": "m"},
        value="1",
    ),
    # From 1 USD an hour to 10; and from 0.1 to 1, and from 10 to 20.
    "WarmrouteSpendingJumped": Case(
        {'warmroute_cost_usd_total{tenant="t",model="m",kind="input"}': jumps(1, 10)},
        {
            'warmroute_cost_usd_total{tenant="t",model="m",kind="input"}': jumps(0.1, 1),
            'warmroute_cost_usd_total{tenant="u",model="m",kind="input"}': jumps(10, 20),
        },
        {"tenant": "t"},
        value="10",
        at=700,
    ),
    "WarmrouteCostEstimated": Case(
        {
            'warmroute_cost_usd_total{tenant="t",model="m"}': "0+10x200",
            'warmroute_estimated_cost_usd_total{tenant="t",model="m"}': "0+5x200",
        },
        {
            'warmroute_cost_usd_total{tenant="t",model="m"}': "0+10x200",
            'warmroute_estimated_cost_usd_total{tenant="t",model="m"}': "0+1x200",
        },
        value="50%",
        at=150,
    ),
    "WarmrouteEventLoopLate": Case(
        {
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="0.25"}': counts(0),
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="0.5"}': counts(100),
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="+Inf"}': counts(100),
        },
        {
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="0.25"}': counts(100),
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="0.5"}': counts(100),
            'warmroute_event_loop_lag_seconds_bucket{pod="gw-0",le="+Inf"}': counts(100),
        },
        POD,
        value="497.5ms",
    ),
}


# record -> (series, the recorded ones at 90 minutes)
RECORDED: Mapping[str, tuple[Series, Mapping[str, float]]] = {
    "warmroute:requests:rate5m": (
        {'warmroute_requests_total{code="200"}': "0+60x90", 'warmroute_requests_total{code="429"}': "0+60x90"},
        {"": 2},
    ),
    "warmroute:errors:ratio5m": (
        {'warmroute_requests_total{code="200"}': "0+60x90", 'warmroute_requests_total{code="500"}': "0+20x90"},
        {"": 0.25},
    ),
    "warmroute:ttft_seconds:p95_5m": (
        {
            'warmroute_ttft_seconds_bucket{model="m",cache="hit",le="1"}': "0+60x90",
            'warmroute_ttft_seconds_bucket{model="m",cache="hit",le="+Inf"}': "0+60x90",
            'warmroute_ttft_seconds_bucket{model="m",cache="miss",le="1"}': "0+60x90",
            'warmroute_ttft_seconds_bucket{model="m",cache="miss",le="+Inf"}': "0+60x90",
        },
        {'model="m"': 0.95},
    ),
    "warmroute:hits:ratio5m": (
        {
            'warmroute_prompt_tokens_total{model="m",replica="a",cache="hit"}': "0+600x90",
            'warmroute_prompt_tokens_total{model="m",replica="b",cache="miss"}': "0+200x90",
        },
        {'model="m"': 0.75},
    ),
    "warmroute:cost_usd_per_hour:rate1h": (
        {
            'warmroute_cost_usd_total{model="m",tenant="t",kind="input"}': "0+1x90",
            'warmroute_cost_usd_total{model="m",tenant="t",kind="output"}': "0+2x90",
        },
        {'model="m", tenant="t"': 180},
    ),
    "warmroute:savings_usd_per_hour:rate1h": (
        {'warmroute_savings_usd_total{model="m",tenant="t"}': "0+1x90"},
        {'model="m", tenant="t"': 60},
    ),
    "warmroute:estimated_cost:ratio1h": (
        {
            'warmroute_cost_usd_total{model="m",tenant="t",kind="input"}': "0+4x90",
            'warmroute_estimated_cost_usd_total{model="m",tenant="t"}': "0+1x90",
        },
        {"": 0.25},
    ),
    "warmroute:routing_saved:ratio1h": (
        {
            'warmroute_policy_cached_tokens_total{policy="actual"}': "0+80x90",
            'warmroute_policy_cached_tokens_total{policy="delivered"}': "0+79x90",
            'warmroute_policy_cached_tokens_total{policy="round_robin"}': "0+30x90",
            'warmroute_policy_cached_tokens_total{policy="session"}': "0+60x90",
            "warmroute_compared_prompt_tokens_total{}": "0+100x90",
        },
        {'policy="round_robin"': 0.5, 'policy="session"': 0.2},
    ),
    "warmroute:routing_saved_usd:today": (
        {
            'warmroute_routing_saved_usd_today{policy="session",pod="a"}': "2x90",
            'warmroute_routing_saved_usd_today{policy="session",pod="b"}': "3x90",
        },
        {'policy="session"': 5},
    ),
    "warmroute:routing_saved_gpu_seconds:today": (
        {'warmroute_routing_saved_gpu_seconds_today{policy="session",pod="a"}': "-2x90"},
        {'policy="session"': -2},
    ),
}


@functools.cache
def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return found


def rules(kind: str) -> Iterator[dict[str, Any]]:
    for group in groups():
        yield from (rule for rule in group["rules"] if kind in rule)


def alerts() -> Iterator[dict[str, Any]]:
    return rules("alert")


def test_each_rule_is_tested() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert sorted(names) == sorted(CASES)
    assert len(set(names)) == len(names)
    assert [rule["record"] for rule in rules("record")] == list(RECORDED)


def test_each_rule_is_about_metrics_that_the_gateway_has() -> None:
    exposed = {instrument.name for instrument in new_metrics().instruments.all}
    for rule in (*alerts(), *rules("record")):
        promql_parser.parse(rule["expr"])  # raises
        named = set(re.findall(r"\bwarmroute[\w:]+", rule["expr"]))
        assert named
        read = {name.removesuffix("_bucket") for name in named if ":" not in name}
        assert read <= exposed, rule
        assert {name for name in named if ":" in name} <= RECORDED.keys()


def test_each_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in alerts():
        assert {"summary", "description", "runbook_url"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["for"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_each_alert_has_its_part_of_the_runbook_and_each_part_its_alert() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    parts = re.findall(r"^## (\w+)\n\n\*(\w+)\*\. (.+)\n\n- \*\*Look\*\*: .+\n- \*\*Do\*\*: .+$", text, re.MULTILINE)
    assert [(name, severity) for name, severity, _ in parts] == [
        (rule["alert"], rule["labels"]["severity"]) for rule in alerts()
    ]
    assert len(re.findall("^## ", text, re.MULTILINE)) == len(parts)


def test_panels_that_the_runbook_names_are_there() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    titles = {each.title for board in BOARDS for each in (*board.panels, *board.rows)}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text)) - {"Status, Targets"}
    assert named
    assert named <= titles


def test_pages_that_alerts_name_are_there() -> None:
    pages = re.findall(r"\bdocs/\w+\.md", RULES.read_text("utf-8"))
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_sections_that_alerts_name_are_there() -> None:
    sections = re.findall(r"\bdocs/(\w+)\.md\s+\(([^)]+)\)", RULES.read_text("utf-8"))
    assert sections
    pages = {page: (ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines() for page, _ in sections}
    assert [title for page, title in sections if f"## {title}" not in pages[page]] == []


@pytest.mark.tools
def test_promtool_reads_the_rules() -> None:
    subprocess.run([tool("promtool"), "check", "rules", RULES], check=True, capture_output=True)


@pytest.mark.tools
@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded(name: str, tmp_path: Path) -> None:
    series, values = RECORDED[name]
    here = ", ".join(f'{key}="{value}"' for key, value in HERE.items())
    samples = [{"labels": f"{{{', '.join(filter(None, [here, labels]))}}}", "value": value} for labels, value in values.items()]
    listed = [{"series": with_here(each), "values": numbers} for each, numbers in series.items()]
    expected = {"expr": f"round({name}, 1e-6)", "eval_time": "90m", "exp_samples": samples}
    checked(name, [{"interval": "1m", "input_series": listed, "promql_expr_test": [expected]}], tmp_path)


@pytest.mark.tools
@pytest.mark.parametrize("name", CASES)
def test_it_fires_when_it_should_and_not_when_all_is_well(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (rule,) = (rule for rule in alerts() if rule["alert"] == name)
    labels = {**case.here, **case.labels, **rule["labels"]}
    annotations = {key: filled(text, labels, case.value) for key, text in rule["annotations"].items()}
    fires = [{"exp_labels": labels, "exp_annotations": annotations}]
    checked(name, [unit(name, case.fires, fires, case.at), unit(name, case.quiet, [], case.at)], tmp_path)


def unit(alert: str, series: Series, expected: Sequence[Mapping[str, Any]], at: int) -> Mapping[str, Any]:
    """One of promtool's tests."""
    rule = {"eval_time": f"{at}m", "alertname": alert, "exp_alerts": expected}
    listed = [{"series": with_here(name), "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": listed, "alert_rule_test": [rule]}


def with_here(series: str) -> str:
    name, _, labels = series.removesuffix("}").partition("{")
    here = [f'{key}="{value}"' for key, value in HERE.items()]
    return f"{name}{{{','.join([*here, *filter(None, [labels])])}}}"


def filled(text: str, labels: Mapping[str, str], value: str) -> str:
    """An annotation as Prometheus fills it in."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], text)
    return re.sub(r"\{\{ \$value \| \w+ \}\}", value, text)


def checked(name: str, tests: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """By the rule alone, with the ones that it reads: promtool computes each rule of a file for each minute. name: "": none."""
    needed = [each for each in (*alerts(), *rules("record")) if name in (each.get("alert"), each.get("record"))]
    for record in reversed(list(rules("record"))):  # a later one may read an earlier one
        if any(record["record"] in each["expr"] for each in needed):
            needed.insert(0, record)
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": needed}]}), "utf-8")
    file = folder / "test.yaml"
    wanted = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": list(tests)}
    file.write_text(yaml.safe_dump(wanted, sort_keys=False), "utf-8")
    done = subprocess.run([tool("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
