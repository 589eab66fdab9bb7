"""The benchmark of fronts: that its system is what it says, and its report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.agents.kinds import KINDS
from bench.agents.run import Plan, Score, run
from bench.fronts.__main__ import Cost, fronted, report
from scripts.fuzzing.diff import nginx_program
from tests.support.tools import missing

CODEX = next(kind for kind in KINDS if kind.name == "responses-list")
SMALL = Plan(conversations=6, turns=4, concurrent=3, think_s=0.01, answer_tokens=8)


@pytest.mark.tools
def test_sessions_stay_by_their_header_and_not_in_turn(tmp_path: Path) -> None:
    if not nginx_program():
        missing("nginx is missing: apt-get install nginx-light")
    hashed, scattered = (run(fronted(4, balance), CODEX, SMALL, tmp_path / balance) for balance in ("session", "round_robin"))
    assert not hashed.errors
    assert not scattered.errors
    assert hashed.later == scattered.later == 18
    assert hashed.stay_share > scattered.stay_share


def test_a_report_compares_with_the_gateway_alone() -> None:
    score = Score("2, session", "responses-list", later=50, stayed=49, prompt=1000, cached=883, errors=Counter({"cut": 1}))
    found = {
        "gateway": [Cost(100.0, 10.0, 0.001, {}), Cost(110.0, 10.0, 0.001, {})],
        "nginx and gateway": [Cost(150.0, 15.0, 0.002, {}), Cost(165.0, 15.0, 0.002, {"cut off": 2})],
    }
    text = "\n".join(report("Made here.", Plan(), [score], found))
    assert "| responses-list | 2, session | 98% | 88.3% | 1 |" in text
    assert "| nginx and gateway | 157.5 | 1.50 (1.50 to 1.50) | 15.0 | 1.50 (1.50 to 1.50) | 2.00 |" in text
    assert text.count("made errors, so its figures do not count") == 1
