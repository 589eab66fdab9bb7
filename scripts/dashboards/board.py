"""A dashboard as a few lines for each panel, and Grafana's JSON of it.

A board is rows of panels, a panel is queries and a description that says how to read it. Where a panel stands follows from the
order and from its size. All queries are limited to the gateways that are selected; which of the other variables of its board a
query is limited to, its metric's labels decide (`Selectors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

COLUMNS: Final = 24
RATE: Final = "$__rate_interval"
RANGE: Final = "$__range"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS: Final = {"timeseries": 8, "bargauge": 8, "stat": 4}

# name -> (title, description, metric, label)
VARIABLES: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "gateway": ("Gateway", "Gateways, as Prometheus scrapes them.", "warmroute_workers", "instance"),
    "pool": ("Pool", "Pools of replicas.", "warmroute_pool_replicas", "pool"),
    "model": ("Model", "Models that clients asked for.", "warmroute_requests_total", "model"),
    "tenant": ("Tenant", "Tenants that have cost something.", "warmroute_cost_usd_total", "tenant"),
    "replica": ("Replica", "Replicas of all pools.", "warmroute_replica_up", "replica"),
}


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one line for each label set. legend: with {{labels}}."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. text: its contents and how to read it. steps: (from this value on, this colour), after green."""

    title: str
    text: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    steps: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below a headline; "" has none."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. name: of its file. question: what its reader wants to know."""

    name: str
    uid: str
    title: str
    question: str
    variables: Sequence[str]
    rows: Sequence[Row] = field(default=())

    @property
    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


@dataclass(frozen=True, slots=True)
class Selectors:
    """Makes selectors of series. variables: the names of the board's variables, without `gateway`."""

    variables: Sequence[str]

    def __call__(self, metric: str, *labels: str, where: str = "") -> str:
        """A selector. labels: the metric's labels; labels that are variables of the board select. where: further matchers."""
        chosen = [f'{label}=~"${label}"' for label in self.variables if label in labels]
        matchers = ['instance=~"$gateway"', *chosen, *([where] if where else [])]
        return f"warmroute_{metric}{{{', '.join(matchers)}}}"

    def rate(self, metric: str, *labels: str, where: str = "") -> str:
        return f"rate({self(metric, *labels, where=where)}[{RATE}])"

    def increase(self, metric: str, *labels: str, where: str = "") -> str:
        """The increase over the range of the dashboard."""
        return f"increase({self(metric, *labels, where=where)}[{RANGE}])"

    def quantile(self, share: float, metric: str, *labels: str, by: str = "") -> str:
        """A quantile of a histogram in seconds. by: further labels."""
        groups = ", ".join(["le", *filter(None, [by])])
        return f"histogram_quantile({share:g}, sum by ({groups}) ({self.rate(f'{metric}_seconds_bucket', *labels)}))"

    def quantiles(self, metric: str, *labels: str, by: str = "", high: float = 0.95) -> tuple[Query, Query]:
        """The median, and a high one."""
        legend = "".join(f"{{{{{name.strip()}}}}} " for name in by.split(",") if name)
        return (
            Query(self.quantile(0.5, metric, *labels, by=by), f"{legend}p50"),
            Query(self.quantile(high, metric, *labels, by=by), f"{legend}p{high * 100:g}"),
        )


def json_of(board: Board) -> dict[str, Any]:
    """The board as JSON that Grafana imports."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.question,
        "tags": ["llm", "warmroute"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "links": [_link()],
        "fiscalYearStartMonth": 0,
        "annotations": {"list": []},
        "templating": {"list": [_data_source(), *map(_variable, board.variables)]},
        "panels": list(_laid_out(board.rows)),
    }


def _link() -> dict[str, Any]:
    """To the other dashboards."""
    return {
        "type": "dashboards",
        "tags": ["warmroute"],
        "title": "Warmroute",
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _data_source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "current": {},
        "options": [],
        "hide": 0,
    }


def _variable(name: str) -> dict[str, Any]:
    label, text, metric, series_label = VARIABLES[name]
    return {
        "name": name,
        "type": "query",
        "label": label,
        "description": text,
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {series_label})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """From left to right, then below."""
    number, top = 0, 0
    for row in rows:
        if row.title:
            number += 1
            yield _headline(number, row.title, top)
            top += 1
        left, height = 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            height = _HEIGHTS[panel.kind]
            number += 1
            yield _panel(number, panel, {"h": height, "w": panel.width, "x": left, "y": top})
            left += panel.width
        top += height


def _headline(number: int, title: str, top: int) -> dict[str, Any]:
    box = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": box, "panels": []}


def _panel(number: int, panel: Panel, box: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults |= {"min": 0} if panel.unit != "none" else {}
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "stacking": stacking,
        }
    if panel.steps:
        steps = [{"color": "green", "value": None}, *({"color": colour, "value": value} for value, colour in panel.steps)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": box,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(chr(ord("A") + place), panel.kind, query) for place, query in enumerate(panel.queries)],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "timeseries":
        legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if kind == "bargauge":
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "gradient", "showUnfilled": True}
    return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "value"}


def _target(ref: str, kind: str, query: Query) -> dict[str, Any]:
    whole = {"instant": True, "range": False} if RANGE in query.expr or kind == "bargauge" else {"range": True}
    common = {"refId": ref, "datasource": DATASOURCE, "editorMode": "code"}
    return {**common, "expr": query.expr, "legendFormat": query.legend, **whole}
