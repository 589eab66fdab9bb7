"""Dashboards and rules against the truth: a real Prometheus that scrapes a real gateway, with all that goes wrong
(`live_stack.py`).

Traffic goes on until every query has answered with something to see, so no test depends on when a scrape happens.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy import dashboard
from tests.deploy.dashboard import FILES, Query
from tests.deploy.live_stack import RULES_FILE, Stack, stack_in
from tests.deploy.processes import until
from tests.support.tiers import nightly
from tests.support.tools import tool

# Exist, and may be zero where nothing is wrong with the database, the store, the gateways' machine or the engines' caches, and
# no other policy is better.
QUIET = {
    *(f"Sharing losses/{ref}" for ref in "ABCDE"),
    *(f"Refused for want of memory or connections/{ref}" for ref in "AB"),
    *(f"Ledger losses/{ref}" for ref in "AB"),
    *(f"Lines and spans lost/{ref}" for ref in "AB"),
    "Snapshots failed/A",
    "Restored blocks/A",
    "Workers/B",
    "Retries by reason/B",
    "Cache hits missing/A",
    "Cache losses/A",
    "Running and waiting in the engines/B",
    "Lost to the ledger/A",
    "Waits for the ledger/A",
    "Waiting/A",
    "In the queue/A",
    "Prediction error/A",
    "Error of the comparison/A",
}
HUNG = "warmroute_replica_hung"  # is there once a replica has hung: tests/gateway/features/hangs
LATE = {"Snapshot age/A", "Snapshot size/A"}  # the first snapshot is written after a minute
# Without data, or zero, for one model, replica, pool and tenant with which all is well.
OF_OTHERS = {
    "Server errors",
    "Errors by endpoint",
    "Time in the queue",
    "Refused by the queue",
    "Broken answers",
    "Resumed streams",
    "Handed to a fallback",
    "Circuits open",
    "Estimated share",
    "Estimated cost per hour",
    "Estimated answers",
    "Answers without a price",
    "Unmetered answers",
}
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text("utf-8"))["groups"] for rule in group["rules"]]
DEADLINE_S = 180

pytestmark = pytest.mark.tools


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack_in(tmp_path_factory.mktemp("live")) as made:
        yield made


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboard.read(request.param)


def flaw(stack: Stack, query: Query, selection: Mapping[str, str]) -> str:
    """What is missing from the query's answer, or nothing."""
    found = stack.series(query.promql(selection))
    if not any(values for _, values in found):
        return "no data"
    if not all(query.legend_labels <= labels for labels, _ in found):
        return f"no label for the legend {query.legend!r}"
    if str(query) not in QUIET and not any(value > 0 for _, values in found for value in values):
        return "nothing but zero"
    return ""


def flaws_of(stack: Stack, queries: list[Query], selection: Mapping[str, str]) -> dict[str, str]:
    return {str(query): reason for query in queries if (reason := flaw(stack, query, selection))}


@pytest.mark.parametrize("selected", [False, True], ids=["all", "one of each"])
def test_every_query_shows_the_traffic(stack: Stack, board: dict[str, Any], selected: bool) -> None:
    queries, selection = [query for query in dashboard.queries(board) if str(query) not in LATE], dict[str, str]()
    if selected:
        selection = {"gateway": stack.instance, "pool": "main", "model": "sim", "tenant": "team-0", "replica": "one"}
        queries = [query for query in queries if query.panel not in OF_OTHERS]
    assert lasting_flaws(stack, queries, selection) == {}


@nightly("that the metrics have values: test_warm_start.py; that the panels ask for them: test_dashboard.py")
def test_panels_of_snapshots_show_the_first_one(stack: Stack) -> None:
    late = [query for file in FILES for query in dashboard.queries(dashboard.read(file)) if str(query) in LATE]
    assert lasting_flaws(stack, late, {}) == {}


def lasting_flaws(stack: Stack, queries: list[Query], selection: Mapping[str, str]) -> dict[str, str]:
    """The flaws that more traffic does not end before the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    stack.traffic()
    while (flaws := flaws_of(stack, queries, selection)) and time.monotonic() < deadline:
        stack.traffic()
    return flaws


def test_the_exceptions_are_about_panels_that_there_are() -> None:
    queries = [query for file in FILES for query in dashboard.queries(dashboard.read(file))]
    assert {str(query) for query in queries} >= QUIET | LATE
    assert {query.panel for query in queries} >= OF_OTHERS


def test_every_variable_has_values(stack: Stack, board: dict[str, Any]) -> None:
    stack.traffic()
    known = {"model": "sim", "replica": "one", "pool": "narrow", "tenant": "team-1", "instance": stack.instance}
    for metric, label in dashboard.variables(board).values():
        has = partial(stack.ask, f"label/{label}/values", **{"match[]": metric})
        assert until(lambda has=has, label=label: known[label] in has(), f"the variable {label} has values")  # type: ignore[misc]


def measured(expr: str) -> list[str]:
    """An alert's expression without its thresholds: what is compared, and what it must not be."""
    text = re.sub(r"\s+", " ", expr).replace(" offset 1h", "")
    text = re.sub(r"^absent\((.*)\)$", r"\1", text)
    pieces = re.split(r" unless | and (?=sum )| < on \([^)]*\) group_left \(\) ", text)
    return [re.sub(r" (==|>|<) [\d.]+", "", piece) for piece in pieces]


def test_thresholds_are_found() -> None:
    assert measured("sum (a > 0) / b > 0.5") == ["sum (a) / b"]
    assert measured("a > 100 unless b > 0") == ["a", "b"]
    assert measured("min by (x) (a and b == 1)\n < on (x, y) group_left ()\n count (c == 1) - 1") == [
        "min by (x) (a and b)",
        "count (c) - 1",
    ]


def test_every_rule_has_something_to_measure(stack: Stack) -> None:
    """Recorded series are there under their names."""
    wanted = [rule["record"] for rule in RULES if "record" in rule]
    wanted += [piece for rule in RULES if "alert" in rule for piece in measured(rule["expr"])]
    for each in wanted:
        promql_parser.parse(each)  # raises
    deadline = time.monotonic() + DEADLINE_S
    stack.traffic()
    while (silent := [each for each in wanted if HUNG not in each and not stack.series(each)]) and time.monotonic() < deadline:
        stack.traffic()
    assert silent == []


def test_promtool_accepts_the_metrics(stack: Stack) -> None:
    stack.traffic()
    command = [str(tool("promtool")), "check", "metrics"]
    done = subprocess.run(command, input=stack.metrics(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_model_that_nobody_serves_is_no_label(stack: Stack) -> None:
    stack.traffic()
    assert 'model="sim"' in stack.metrics()
    assert "unheard-of" not in stack.metrics()


# Alerts about what is wrong in this stack. Those that depend on how much of it there was lately may be true.
TRUE_HERE = {
    "WarmrouteNoReplica",
    "WarmrouteReplicaDown",
    "WarmrouteErrors",
    "WarmrouteBrokenStreams",
    "WarmrouteQueueRefusals",
    "WarmrouteModelWithoutPrice",
    "WarmrouteReloadInvalid",
    "WarmrouteReplicaFinding",
}
MAY_BE_TRUE = {
    "WarmrouteReplicaCircuitOpen",
    "WarmrouteRetryBudgetExhausted",
    "WarmroutePoolSaturated",
    "WarmrouteKeysRefused",
    "WarmrouteCostEstimated",
}


def test_alerts_are_about_what_is_wrong_and_nothing_else(stack: Stack) -> None:
    def pending() -> set[str]:
        stack.traffic()
        return {rule["alert"] for rule in RULES if "alert" in rule and stack.ask("query", query=rule["expr"])["result"]}

    assert until(lambda: (found := pending()) >= TRUE_HERE and found, "the alerts see what is wrong")
    assert pending() - MAY_BE_TRUE == TRUE_HERE
