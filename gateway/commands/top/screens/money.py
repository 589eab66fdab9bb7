"""Hits and money over time, and by model and tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal
from textual.widgets import Static

from gateway.commands.top.access import Access
from gateway.commands.top.bars import bars
from gateway.commands.top.columns import Column
from gateway.commands.top.rows import Point
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.screens.tables import Line, Rows
from gateway.commands.top.state import Live, Sum, Totals
from gateway.commands.top.values import age, count, duration, money, percent, rate, share, short

COLUMNS: Final = (
    Column("", 8, grows=True),
    Column("requests", 8, right=True),
    Column("failed", 6, 5, right=True),
    Column("prompt", 7, 3, right=True),
    Column("cached", 6, 1, right=True),
    Column("cost", 8, right=True),
    Column("saved", 8, 2, right=True),
)
Value = Callable[[Sequence[Point], float], float | None]


class Series(NamedTuple):
    """value: of the points of one bar, which are that many seconds. said: of all that is shown, and the last point."""

    title: str
    color: str
    value: Value
    said: Callable[[Totals, Point, float | None], str]


def _sum(points: Sequence[Point], field: str) -> float:
    return float(sum([getattr(point, field) for point in points]))


def _most(points: Sequence[Point], field: str) -> float | None:
    return max([value for point in points if (value := getattr(point, field)) is not None], default=None)


def _hits(points: Sequence[Point], _seconds: float) -> float | None:
    return share(_sum(points, "cached_tokens"), _sum(points, "prompt_tokens"))


def _per(totals: Totals, value: float) -> float:
    return value / totals.seconds if totals.seconds else 0.0


SERIES: Final[Sequence[Series]] = (
    Series(
        "Requests/s",
        "blue",
        lambda points, seconds: _sum(points, "requests") / seconds,
        lambda totals, _, most: f"mean {rate(_per(totals, totals.requests))}, most {rate(most or 0.0)}",
    ),
    Series("Cached tokens", "green", _hits, lambda totals, _, _most: f"{percent(totals.hits)} of {short(totals.prompt)}"),
    Series(
        "USD spent",
        "magenta",
        lambda points, seconds: _sum(points, "cost_usd") * 60 / seconds,
        lambda totals, _, most: f"{money(totals.cost)}, most {money(most)} a minute",
    ),
    Series(
        "USD saved",
        "cyan",
        lambda points, seconds: _sum(points, "saved_usd") * 60 / seconds,
        lambda totals, _, most: f"{money(totals.saved)}, most {money(most)} a minute",
    ),
    Series(
        "TTFT p90",
        "yellow",
        lambda points, _: _most(points, "ttft_p90_s"),
        lambda _, last, most: f"now {duration(last.ttft_p90_s)}, most {duration(most)}",
    ),
    Series(
        "Under way",
        "blue",
        lambda points, _: max([point.running + point.waiting for point in points]),
        lambda _, last, _most: f"{count(last.running)} running, {count(last.waiting)} waiting",
    ),
)


def drawn(live: Live, series: Series, width: int, height: int = 2) -> Text:
    """A title with what there is to say, and bars below. Each bar is as many steps as are needed to have room for all."""
    points = list(live.points)
    if not points:
        return Text(f"{series.title}  –", style="dim")
    steps = max(1, -(-len(points) // max(1, width)))
    # Steps are grouped by their time, so that a bar stays what it is when the next step comes.
    groups = dict[int, list[Point]]()
    for point in points:
        groups.setdefault(int(point.time // (steps * live.step_s)), []).append(point)
    values = [series.value(group, len(group) * live.step_s) for group in groups.values()]
    totals = live.totals(len(points) * live.step_s)
    most = max([value for value in values if value is not None], default=None)
    made = Text(series.title, style="bold").append(f"  {series.said(totals, points[-1], most)}", style="not bold")
    made.truncate(width, overflow="ellipsis")
    for line in bars(values, width, height):
        made.append("\n" + line, style=f"not bold {series.color}")
    return made


def lines(sums: dict[str, Sum]) -> list[Line]:
    """Most money first, then most requests."""
    ordered = sorted(sums.items(), key=lambda item: (-item[1].cost, -item[1].requests, item[0]))
    return [
        Line(
            name,
            [
                (name, ""),
                (count(each.requests), ""),
                (count(each.failed), "red" if each.failed else "dim"),
                (short(each.prompt), ""),
                (percent(share(each.cached, each.prompt)), ""),
                (money(each.cost), ""),
                (money(each.saved), ""),
            ],
        )
        for name, each in ordered
    ]


class Chart(Static):
    """One series, as wide as there is room."""

    def __init__(self, live: Live, series: Series, **options: Any) -> None:
        super().__init__(**options)
        self._of = live
        self._series = series

    def draw(self) -> None:
        if self.content_size.width > 0:
            self.update(drawn(self._of, self._series, self.content_size.width))

    def on_resize(self, _event: events.Resize) -> None:
        self.draw()


class Money(Pane):
    def __init__(self, access: Access, live: Live, **options: Any) -> None:
        super().__init__(access, live, **options)
        self.charts = [Chart(live, series, classes="chart") for series in SERIES]
        self.models = Rows((COLUMNS[0]._replace(name="model"), *COLUMNS[1:]), id="models")
        self.tenants = Rows((COLUMNS[0]._replace(name="tenant"), *COLUMNS[1:]), id="tenants")

    def compose(self) -> ComposeResult:
        yield Grid(*self.charts, id="charts")
        yield Horizontal(self.models, self.tenants, id="sums")
        yield self.note

    def show(self) -> None:
        for chart in self.charts:
            chart.draw()
        self.models.show(lines(self.live.models))
        self.tenants.show(lines(self.live.tenants))
        self.note.update(self._note())

    def _note(self) -> str:
        live = self.live
        parts = [f"charts: the last {age(len(live.points) * live.step_s)}", "tables: requests seen here"]
        if live.shown_share < 1:
            parts.append(f"which are {percent(live.shown_share)} of all")
        unpriced = [point for point in live.points if point.prompt_tokens and not (point.cost_usd or point.saved_usd)]
        if unpriced and not any(point.cost_usd for point in live.points):
            parts.append("nothing is priced: set `prices` in the configuration")
        return "  ·  ".join(parts)
