"""A Grafana dashboard as the tests see it: its panels, its queries, and the PromQL that Grafana would send."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tools import ROOT

FILES = sorted((ROOT / "dashboards").glob("*.json"))
EVERYTHING = ".*"
"""What a variable expands to when All is selected (its allValue)."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of one panel."""

    panel: str
    ref: str
    expr: str
    legend: str
    file: Path = Path()

    def __str__(self) -> str:
        return f"{self.panel}/{self.ref}"

    @property
    def legend_labels(self) -> set[str]:
        return set(re.findall(r"{{\s*(\w+)\s*}}", self.legend))

    def promql(self, selection: Mapping[str, str] | None = None, rate_interval: str = "1m", span: str = "5m") -> str:
        """The expression with Grafana's variables filled in; `selection` gives the value of a dashboard variable."""
        built_in = {"__rate_interval": rate_interval, "__range": span}
        return fill(self.expr, {**built_in, **(selection or {})})


def fill(expr: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], EVERYTHING), expr)


def read(path: Path) -> dict[str, Any]:
    loaded = json.loads(path.read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All panels but the rows, those inside of collapsed rows too."""
    flat = [panel for top in board["panels"] for panel in (top, *top.get("panels", ()))]
    return [panel for panel in flat if panel["type"] != "row"]


def queries(board: Mapping[str, Any], file: Path = Path()) -> Iterator[Query]:
    for panel in panels(board):
        for target in panel["targets"]:
            yield Query(panel["title"], target["refId"], target["expr"], target["legendFormat"], file)


def variables(board: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The query variables: name -> (metric, label) of their `label_values(metric, label)`."""
    found = {}
    for item in board["templating"]["list"]:
        if item["type"] == "query":
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", item["query"]["query"])
            assert match, f"the variable {item['name']} is not label_values(metric, label)"
            found[item["name"]] = (match[1], match[2])
    return found
