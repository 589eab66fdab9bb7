"""What the picture shows; how it looks is for eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.commands.plot import SHORTEST_S, Curve, PlotError, check, draw, figure, hit_ratios, survival
from router.simulation.fleet import ServedRequest
from router.simulation.workloads import SimulatedRequest
from router.types import Prompt


def curve(*waits: float, name: str = "cost") -> Curve:
    return Curve(name, [float(number) for number in range(len(waits))], waits, [100] * len(waits), [25] * len(waits))


def test_a_curve_is_made_of_what_was_served() -> None:
    served = ServedRequest(SimulatedRequest(Prompt(b"", 700, 64, ""), 9, ""), arrived=3.0, cached_tokens=640, first_token=5.0)
    assert Curve.of("cost", [served], bound=True) == Curve("cost", [3.0], [2.0], [700], [640], bound=True)


def test_survival_by_hand() -> None:
    waits, shares = survival(curve(4.0, 1.0, 0.0, 2.0))
    assert dict(zip(waits, shares, strict=True)) == {SHORTEST_S: 100, 1.0: 75, 2.0: 50, 4.0: 25}


def test_a_thinned_line_keeps_its_ends_and_its_tail() -> None:
    waits, shares = survival(curve(*(float(number) for number in range(1, 100_001))))
    assert len(waits) <= 401
    assert (waits[0], shares[0]) == (1.0, 100)
    assert waits[-5:] == [99_996.0, 99_997.0, 99_998.0, 99_999.0, 100_000.0]
    assert shares == sorted(shares, reverse=True)
    assert all(share == pytest.approx(100 * (100_001 - wait) / 100_000) for wait, share in zip(waits, shares, strict=True))


def test_hits_over_time_by_hand() -> None:
    """Two slices of a quarter of a minute are filled; the last one holds the latest arrival."""
    minutes, ratios = hit_ratios(Curve("cost", [0.0, 1.0, 600.0], [1.0] * 3, [100, 300, 50], [0, 100, 50]))
    assert minutes == pytest.approx([0.125, 9.875])
    assert ratios == [25.0, 100.0]
    assert hit_ratios(Curve("cost", [0.0], [1.0], [10], [5]))[1] == [50.0], "all at once"


def test_the_figure_has_both_axes_and_names_all_policies() -> None:
    curves = [curve(0.5, 1.0, 2.0, name=f"p{number}") for number in range(20)]
    curves.append(Curve("pooled", [0.0], [1.0], [10], [5], bound=True))
    picture = figure(curves, "a trace")
    waits, hits = picture.axes
    assert (waits.get_xscale(), waits.get_yscale(), hits.get_xscale()) == ("log", "log", "linear")
    assert all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in (waits, hits))
    [legend] = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == [one.name for one in curves]
    policies = waits.get_lines()[:18]
    assert len({(line.get_color(), line.get_linestyle()) for line in policies}) == 18, "each is distinct from the others"


def test_what_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    check(tmp_path / "picture.PNG")
    with pytest.raises(PlotError, match="directory"):
        draw(tmp_path, [curve(1.0)], "")
