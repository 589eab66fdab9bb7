"""The benchmark of policies on its smallest workload, and the arithmetic of its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.router.policies import cases, main, mean, table
from router.simulation.fleet import Result
from router.simulation.generators import GENERATORS

ROW = Result("cost", 8, 1000, 100, 0.5, 2.0, 1.0, 3.0, 4.0, 9.0, 1.1)


def test_a_report_has_a_table_for_each_workload_and_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "gen:burst_head", "--policy", "round_robin,longest_prefix,pooled", "--replicas", "2,4"]
    main([*arguments, "--workers", "1", "--seed", "3", "--out", str(tmp_path)])
    text = (tmp_path / "policies.md").read_text("utf-8")
    assert capsys.readouterr().out == text + "\n"
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## gen:burst_head: generator burst_head, 2 replicas of 1,000,000 KV tokens",
        "## gen:burst_head: generator burst_head, 4 replicas of 1,000,000 KV tokens",
    ]
    assert text.count("| **round_robin** |") == 2
    assert text.count("| longest_prefix |") == 2
    assert "--workload gen:burst_head" in text
    assert "seed 3" in text
    found = json.loads((tmp_path / "policies.json").read_text("utf-8"))["results"]
    assert [(one["workload"], one["replicas"], one["policy"], one["requests"]) for one in found] == [
        ("gen:burst_head", size, policy, 50 * size) for size in (2, 4) for policy in ("longest_prefix", "pooled", "round_robin")
    ]


def test_a_table_is_sorted_and_compared_with_the_bound() -> None:
    rows = [replace(ROW, policy="slow", ttft_mean_s=6.0), ROW, replace(ROW, policy="pooled", ttft_mean_s=1.0)]
    *_, first, second, third = table(rows)
    assert first.startswith("| *pooled* | 100 | 50.0% | 1.000 | 1.00 |")
    assert second.startswith("| **cost** | 100 | 50.0% | **2.000** | 2.00 |")
    assert third.startswith("| slow | 100 | 50.0% | 6.000 | 6.00 |")


def test_a_mean_is_taken_field_by_field() -> None:
    other = replace(ROW, requests=103, hit_ratio=0.7, load_skew=1.3)
    averaged = mean([ROW, other])
    assert (averaged.policy, averaged.replicas, averaged.kv_tokens, averaged.requests) == ("cost", 8, 1000, 102)
    assert averaged.hit_ratio == pytest.approx(0.6)
    assert averaged.ttft_mean_s == 2.0
    assert averaged.load_skew == pytest.approx(1.2)


def test_all_generators_are_in_it() -> None:
    assert {name.removeprefix("gen:") for name in cases() if name.startswith("gen:")} == set(GENERATORS)


def test_the_error_for_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--policy", "--workload"):
        with pytest.raises(SystemExit):
            main([flag, "nonsense"])
        assert "'nonsense' is not one of" in capsys.readouterr().err
