"""The routing benchmark on its smallest plan: what is in the report, never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.router.growth import Point, draw
from bench.router.routing import SIZES, SORTS, Plan, Row, growth_table, main, table

TINY = Plan(blocks=2_000, steps=(500,), beyond=(3_000,), rounds=2, requests=4)
ROW = Row("warmroute", 8, 1_000, 2_000, SORTS[0], 40.0, 80.0, 0.5, 300.0)


def test_a_report_has_a_table_for_each_sort_of_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "warmroute,dictionaries", "--replicas", "2,8", "--out", str(tmp_path)], TINY)
    text = (tmp_path / "routing.md").read_text("utf-8")
    assert capsys.readouterr().out == text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["## Next turn", "## Again", "## Cold"]
    assert text.count("| **warmroute** |") == text.count("| dictionaries |") - 2 == len(SIZES) * 2 * len(SORTS)
    assert "`gorgo-lb` was not measured" in text
    assert "2,000 block credits" in text
    found = json.loads((tmp_path / "routing.json").read_text("utf-8"))
    assert found["plan"]["blocks"] == 2_000
    rows = [Row(**row) for row in found["rows"]]
    grown = {row.blocks for row in rows if row.contestant == "warmroute" and row.replicas == 8}
    assert grown == {500, 2_000, 3_000}
    assert {row.blocks for row in rows if row.contestant == "dictionaries"} == {500, 2_000}
    assert all(row.held == 0 for row in rows if row.sort == "cold")
    assert all(0 < row.p50 <= row.p99 for row in rows)
    assert (tmp_path / "routing-growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_compares_with_ours() -> None:
    other = Row("other", 8, 1_000, 2_000, SORTS[0], 100.0, 120.0, 0.25, 450.0)
    assert list(table([other, ROW], 300.0))[2:] == [
        "| 2 kB | 8 | other | 100.0 | 120.0 | 2.50 | 25% | 1.50 |",
        "| 2 kB | 8 | **warmroute** | 40.0 | 80.0 | 1.00 | 50% | 1.00 |",
    ]


def test_a_growth_table_has_gaps_where_nothing_was_measured() -> None:
    rows = [
        ROW,
        Row("warmroute", 8, 3_000, 2_000, SORTS[0], 44.0, 80.0, 0.5, 300.0),
        Row("other", 8, 3_000, 2_000, SORTS[0], 9.0, 9.0, 0.0, 300.0),
    ]
    assert list(growth_table(rows))[:4] == [
        "| prompt | | 1,000 | 3,000 |",
        "|--:|---|--:|--:|",
        "| 2 kB | warmroute | 40.0 | 44.0 |",
        "| 2 kB | other |  | 9.0 |",
    ]


def test_a_picture_of_one_point_can_be_drawn(tmp_path: Path) -> None:
    assert draw(tmp_path / "one.png", [Point("warmroute", 2_000, 10_000, 40.0)])
    assert not draw(tmp_path / "none.png", [])


def test_the_error_for_an_unknown_contestant_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "'nonsense' is not one of warmroute" in capsys.readouterr().err
