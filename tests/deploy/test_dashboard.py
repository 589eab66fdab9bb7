"""The dashboards without Grafana or Prometheus: well built, valid PromQL, and only metrics that the gateway exports.

That every query really answers is `test_dashboard_live.py`'s to show.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from gateway.features.table import new_metrics
from scripts.dashboards.__main__ import page, texts
from tests.deploy import dashboard
from tests.deploy.dashboard import FILES, Query

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUERIES = [query for file in FILES for query in dashboard.queries(dashboard.read(file), file)]
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
# What is divided by a metric without such a label is not limited to it either.
UNLIMITED = {"Cost of a million tokens": {"tenant"}, "Hit ratio, predicted and reported": {"replica"}}
GROWING = {"_total", "_bucket", "_count", "_sum"}


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboard.read(request.param)


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of all series that the gateway can export."""
    return {family.name + suffix for family in new_metrics().registry.collect() for suffix in SUFFIXES[family.type]}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    return {each.name.removesuffix("_total"): set(each.labels) for each in new_metrics().instruments.all}


def parsed(query: Query) -> promql_parser.Expr:
    return promql_parser.parse(query.promql())


def selectors(query: Query) -> tuple[set[str], set[str]]:
    """The metrics that the query reads: those over a time range, those as they are now."""
    over_time: list[str] = []
    all_of_them: list[str] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            over_time.append(str(node.vector_selector.name))
        elif isinstance(node, promql_parser.VectorSelector):
            all_of_them.append(str(node.name))
        return True

    promql_parser.walk(parsed(query), visit)
    now = Counter(all_of_them) - Counter(over_time)  # the walk visits a range's inner selector too
    return set(over_time), set(now)


def test_the_dashboards_are_as_they_are_made() -> None:
    assert [file.name for file in FILES] == ["warmroute-fleet.json", "warmroute-money.json", "warmroute-router.json"]
    assert {file.name: file.read_text("utf-8") for file in FILES} == texts(), "run: python -m scripts.dashboards"


def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    cells = Counter(cell for panel in board["panels"] for cell in cells_of(panel["gridPos"]))
    assert [cell for cell, panels in cells.items() if panels > 1] == []
    assert [cell for cell in cells if not 0 <= cell[0] < COLUMNS] == []


def cells_of(box: dict[str, int]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(range(box["x"], box["x"] + box["w"]), range(box["y"], box["y"] + box["h"]))


def test_each_panel_explains_itself(board: dict[str, Any]) -> None:
    for panel in dashboard.panels(board):
        assert panel["title"], panel["id"]
        assert re.fullmatch(r"[A-Z0-4].*\.", panel["description"]), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
    titles = [panel["title"] for panel in dashboard.panels(board)]
    assert len(titles) == len(set(titles))


def test_the_data_source_is_a_variable_everywhere(board: dict[str, Any]) -> None:
    assert board["templating"]["list"][0] | {"name": "datasource", "type": "datasource"} == board["templating"]["list"][0]
    users = [*dashboard.panels(board), *(target for panel in dashboard.panels(board) for target in panel["targets"])]
    users += [variable for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert [user for user in users if user["datasource"] != DATASOURCE] == []


def test_variables_are_used_and_used_ones_are_there(board: dict[str, Any]) -> None:
    used = {name for query in dashboard.queries(board) for name in re.findall(r"\$\{?(\w+)", query.expr)}
    assert used - {"__rate_interval", "__range"} == dashboard.variables(board).keys()
    assert {item["allValue"] for item in board["templating"]["list"] if item["type"] == "query"} == {".*"}
    assert "gateway" in used


def test_variables_read_exported_metrics(board: dict[str, Any], exported: set[str]) -> None:
    assert {metric for metric, _ in dashboard.variables(board).values()} <= exported


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_queries_read_exported_metrics_as_their_type_allows(query: Query, exported: set[str]) -> None:
    """A counter as a rate or an increase, a gauge as it is."""
    over_time, now = selectors(query)
    assert over_time | now <= exported
    assert [name for name in over_time if not name.endswith(tuple(GROWING))] == []
    assert [name for name in now if name.endswith(tuple(GROWING))] == []


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_time_ranges_follow_the_dashboard(query: Query) -> None:
    """A fixed [5m] would be wrong for one scrape interval or the other."""
    assert set(re.findall(r"}\[(.*?)\]", query.expr)) <= {"$__rate_interval", "$__range"}


def test_the_checks_notice_mistakes(exported: set[str]) -> None:
    misspelt = Query("p", "A", 'sum(rate(warmroute_request_total{model=~"$model"}[$__rate_interval]))', "")
    assert selectors(misspelt) == ({"warmroute_request_total"}, set())
    assert "warmroute_request_total" not in exported
    assert selectors(Query("p", "A", "warmroute_requests_total - rate(warmroute_requests_total[$__range])", "")) == (
        {"warmroute_requests_total"},
        {"warmroute_requests_total"},
    )
    with pytest.raises(ValueError, match="unclosed"):
        parsed(Query("p", "A", "sum(rate(warmroute_requests_total[$__range])", ""))


def test_the_docs_name_every_panel(root: Path) -> None:
    text = (root / "docs" / "dashboards.md").read_text("utf-8")
    assert page(text) == text, "run: python -m scripts.dashboards"


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_queries_are_limited_to_what_is_selected(query: Query, exported: set[str], labels: dict[str, set[str]]) -> None:
    """By the gateway, and by those variables of the board that the metric has as labels."""
    for name, matchers in re.findall(r"\b((?:warmroute|process)_\w+){(.*?)}", query.expr):
        metric = next(name.removesuffix(suffix) for suffix in ("_bucket", "_total", "") if name.endswith(suffix))
        selected = set(re.findall(r'(\w+)=~"\$\w+"', matchers))
        assert "instance" in selected
        variables = dashboard.variables(dashboard.read(query.file)).keys() & labels[metric]
        assert selected - {"instance"} >= variables - UNLIMITED.get(query.panel, set())


def test_no_query_reads_other_programs() -> None:
    """Everything has process_*; `.*` stands for all gateways."""
    about_processes = [query for query in QUERIES if "process_" in query.expr]
    assert about_processes
    assert [str(query) for query in about_processes if "on (instance) warmroute_workers" not in query.expr] == []
