"""The plot of `warmroute simulate --plot`: TTFT, and the hit ratio over time.

Left, the share of requests whose TTFT exceeds a time, with logarithmic axes, so that the tail is as readable as the middle.
Right, the hit ratio by time of arrival. matplotlib is an extra, imported only here and only for --plot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.simulation.fleet import ServedRequest

SLICES = 40
POINTS = 400  # per curve
SHORTEST_S = 0.01  # shorter TTFTs are drawn as this
# Okabe and Ito's colours, distinguishable by colour-blind readers; then the same with other dashes. Bounds are black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.")


class PlotError(Exception):
    """The plot cannot be drawn; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's requests: arrival (s), TTFT (s), prompt tokens, cached tokens; in the same order.

    bound: a bound on policies, not a policy.
    """

    name: str
    arrived: Sequence[float]
    ttft_s: Sequence[float]
    prompt: Sequence[int]
    cached: Sequence[int]
    bound: bool = False

    @classmethod
    def of(cls, name: str, served: Sequence[ServedRequest], *, bound: bool = False) -> Curve:
        return cls(
            name,
            [one.arrived for one in served],
            [one.first_token - one.arrived for one in served],
            [one.request.tokens for one in served],
            [one.cached_tokens for one in served],
            bound,
        )


def check(path: Path) -> None:
    """Checks the path before the simulation. Raises PlotError."""
    if path.suffix.lower() != ".png":
        raise PlotError(f"{path} is not the name of a .png file")
    if not path.parent.is_dir():
        raise PlotError(f"{path.parent} is not a directory")
    _figure_kind()


def draw(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Draws the plot into a file. Raises PlotError."""
    try:
        figure(curves, title).savefig(path, format="png")
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror or error}") from error


def figure(curves: Sequence[Curve], title: str) -> Any:
    """The picture as a matplotlib figure: two axes and a legend beside them."""
    picture = _figure_kind()(figsize=(13, 5.2), dpi=110, layout="constrained")
    picture.suptitle(title, fontsize=12)
    waits, hits = picture.subplots(1, 2)
    for curve, style in zip(curves, _styles(curves), strict=True):
        waits.step(*survival(curve), where="pre", label=curve.name, **style)
        hits.plot(*hit_ratios(curve), label=curve.name, **style)
    _label_waits(waits, max(len(curve.ttft_s) for curve in curves))
    hits.set(title="Prompt tokens found in a cache", xlabel="time of arrival (minutes)", ylabel="hit ratio (%)")
    hits.set_ylim(0, min(105, max(1, 1.1 * hits.dataLim.y1)))
    for axes in (waits, hits):
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    picture.legend(*waits.get_legend_handles_labels(), loc="outside right upper", frameon=False, title="policy")
    return picture


def _styles(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """The style of each curve."""
    policies, bounds = itertools.count(), itertools.cycle(("--", ":"))
    for curve in curves:
        if curve.bound:
            yield {"color": "black", "linestyle": next(bounds), "linewidth": 1.3}
        else:
            number = next(policies)
            dash = DASHES[number // len(COLOURS) % len(DASHES)]
            yield {"color": COLOURS[number % len(COLOURS)], "linestyle": dash, "linewidth": 1.6 if number else 2.4}


def _label_waits(axes: Any, requests: int) -> None:
    axes.set(
        title="Time to first token",
        xlabel="seconds",
        ylabel="requests with at least this TTFT (%)",
        xscale="log",
        yscale="log",
        ylim=(min(0.9, max(100 / requests, 0.01)), 120),
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for share, name in ((50, "p50"), (10, "p90"), (1, "p99")):
        axes.axhline(share, color="#999999", linewidth=0.7, linestyle=(0, (2, 3)))
        offset = {"xycoords": ("axes fraction", "data"), "xytext": (3, 2), "textcoords": "offset points"}
        axes.annotate(name, (0, share), color="#555555", **offset)


def survival(curve: Curve) -> tuple[list[float], list[float]]:
    """(seconds, percentage of requests with at least this TTFT), reduced to about POINTS points."""
    waits, count = sorted(curve.ttft_s), len(curve.ttft_s)
    # evenly on the logarithm of the share, to show the tail
    ranks = sorted({count - max(1, round(count ** (step / POINTS))) for step in range(POINTS + 1)})
    return [max(SHORTEST_S, waits[rank]) for rank in ranks], [100 * (count - rank) / count for rank in ranks]


def hit_ratios(curve: Curve) -> tuple[list[float], list[float]]:
    """(minutes, hit ratio in percent) of each time slice with arrivals."""
    width = max(curve.arrived) / SLICES or 1.0
    prompt, cached = [0] * SLICES, [0] * SLICES
    for at, tokens, hit in zip(curve.arrived, curve.prompt, curve.cached, strict=True):
        index = min(SLICES - 1, math.floor(at / width))
        prompt[index] += tokens
        cached[index] += hit
    filled = [index for index in range(SLICES) if prompt[index]]
    return [(index + 0.5) * width / 60 for index in filled], [100 * cached[index] / prompt[index] for index in filled]


def _figure_kind() -> Any:
    """matplotlib's Figure, used without pyplot: no window, no state shared by figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("matplotlib is not installed; pip install 'matplotlib>=3.10'") from error
    return Figure
