"""Resends through a real gateway over stand-ins: each is cached, or the log says why not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.agents.engine import Model
from bench.agents.resends import Cell, Resend, Resends, measured, parse, results_in, table
from bench.agents.run import Plan

SMALL = Resends(count=24, plan=Plan(replicas=2, answer_tokens=8, model=Model(prefill_rate=200_000.0)))


@pytest.mark.parametrize("marked", [True, False])
def test_resends_are_cached(tmp_path: Path, marked: bool) -> None:
    cell = measured(SMALL, Cell(100_000, 1.0, marked), tmp_path)
    assert [resend.error for resend in cell.resends] == [""] * SMALL.count
    assert all(resend.prompt > 5000 for resend in cell.resends)
    assert cell.unexplained == 0
    if marked:
        assert cell.hits + cell.reasons.total() == SMALL.count
    else:
        assert set(cell.reasons) <= {"none logged"}
    assert cell.hits > SMALL.count / 2


def test_what_a_cache_cannot_hold_has_a_logged_reason(tmp_path: Path) -> None:
    tiny = dataclasses.replace(SMALL, count=6)
    cell = measured(tiny, Cell(1_600, 1.0, marked=True), tmp_path)
    assert (cell.hits, cell.unexplained) == (0, 0)
    assert cell.reasons == {"missed": tiny.count}


def test_only_what_was_not_cached_needs_a_reason() -> None:
    cell = Cell(100, 2.0, marked=True)
    cell.resends = [
        Resend("a", 6000, 6000),
        Resend("b", 6000, 16),
        Resend("c", 6000, 16),
        Resend("d", error="500"),
        Resend("e", 6000),
    ]
    lines = [
        {"id": "b", "breakpoint": "busy"},
        {"id": "c", "breakpoint": "new"},
        {"id": "d", "breakpoint": "failed"},
        {"id": "e"},
    ]
    cell.explain(results_in(["listening", "[1]", *map(json.dumps, lines)]))
    assert cell.hits == 1
    assert cell.reasons == {"busy": 1, "new": 1, "failed": 1, "none logged": 1}
    assert cell.unexplained == 2, "`new` explains no resend"
    row = list(table([cell]))[-1]
    assert "| 100 | 2 | with breakpoints | 5 | 20.0% | busy 20.0%, new 20.0%, failed 20.0%, none logged 20.0% | 2 |" in row


def test_the_command_s_options() -> None:
    plan, kept = parse(["--resends", "5", "--loads", "1,3", "--kv-tokens", "7", "--report"])
    assert (plan.count, plan.loads, plan.caches, kept) == (5, (1.0, 3.0), (7,), True)
    assert plan.rate(3) == pytest.approx(3 * plan.rate(1))
