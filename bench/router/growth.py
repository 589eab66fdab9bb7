"""The picture of bench.routing: the cost of a decision as the index grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, distinguishable by colour-blind readers; ours first.
STYLES = (("#0072B2", "o", 2.4), ("#D55E00", "s", 1.4), ("#009E73", "^", 1.4), ("#CC79A7", "D", 1.4))


@dataclass(frozen=True, slots=True)
class Point:
    """One contestant's p50 (us) for prompts of a size (bytes) over an index of `blocks`."""

    contestant: str
    size: int
    blocks: int
    us: float


def draw(path: Path, points: Sequence[Point]) -> bool:
    """False if there is nothing to draw, or no matplotlib to draw with."""
    if not points:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    picture = Figure(figsize=(12, 4.8), dpi=110, layout="constrained")
    picture.suptitle("One decision (hash, choose, first token, close), 8 replicas: a conversation's next turn", fontsize=12)
    sizes = sorted({point.size for point in points})
    panels = picture.subplots(1, len(sizes), squeeze=False)[0]
    names = list(dict.fromkeys(point.contestant for point in points))
    for axes, size in zip(panels, sizes, strict=True):
        for name, style in zip(names, STYLES, strict=False):
            draw_line(axes, [point for point in points if (point.contestant, point.size) == (name, size)], style)
        dress(axes, size)
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    picture.savefig(path, format="png")
    return True


def draw_line(axes: Any, points: Sequence[Point], style: tuple[str, str, float]) -> None:
    colour, marker, width = style
    blocks, us = [point.blocks for point in points], [point.us for point in points]
    if not points:
        return
    axes.plot(blocks, us, color=colour, marker=marker, linewidth=width, markersize=5, label=points[0].contestant)
    if style is STYLES[0]:
        logarithm = [us[0] * math.log(count) / math.log(blocks[0]) for count in blocks]
        axes.plot(blocks, logarithm, color="#555555", linestyle=":", linewidth=1.2, label="ours, if it grew as log(blocks)")


def dress(axes: Any, size: int) -> None:
    axes.set(
        title=f"prompts of {size // 1000} kB",
        xlabel="block credits in the index",
        ylabel="p50 (us)",
        xscale="log",
        yscale="log",
    )
    low, high = axes.get_ylim()
    ticks = [
        tick for power in range(6) for tick in (10**power, 2 * 10**power, 5 * 10**power) if low / 1.5 <= tick <= high * 1.5
    ]
    axes.set_ylim(min(low, ticks[0]), max(high, ticks[-1]))
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_yticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
