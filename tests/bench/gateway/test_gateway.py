"""The gateway benchmark: its report from known scores, and its smallest run with two real systems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gateway.data_plane import LoadResult, Plan, Turn, Wait, main, parse, score
from bench.gateway.scores import Score, draw, report
from bench.gateway.systems import BEFORE, SYSTEMS

TINY = Plan(rounds=1, short=60, long=20, waves=1, seconds=1.0, ttft_seconds=1.2)
REFERENCE = Score(
    name="sglang-router",
    version="0.3",
    short_us=60.0,
    long_us=100.0,
    chunk_us=20.0,
    rate=12_000.0,
    busy=0.97,
    added_p50_ms=40.0,
    added_p99_ms=45.0,
    stream_rate=900.0,
    rss_mb=100.0,
    peak_mb=120.0,
)
OURS = replace(REFERENCE, name="warmroute", version="0.1", short_us=45.0, long_us=80.0, chunk_us=15.0, busy=0.5)


def test_a_report_compares_with_the_reference_and_states_what_was_kept() -> None:
    reference = replace(REFERENCE, rounds=[(60.0, 100.0, 20.0)] * 3)
    ours = replace(OURS, rounds=[(45.0, 80.0, 15.0), (90.0, 90.0, 30.0), (60.0, 200.0, 10.0)])
    text = "\n".join(report([reference, ours], ["nginx is not installed."], "Made here.", drawn=True))
    assert text.index("| **warmroute** | 0.1 | 45.0 | 80.0 | 15.0 | at least 12,000 | 40.00 ") < text.index("| sglang-router |")
    assert "| **warmroute** | 0.75 | 0.80 | 0.75 |" in text
    assert "| *warmroute, the median of the rounds' ratios* | 1.00 | 0.90 | 0.75 |" in text
    assert "| *kept?* | yes | **no** | yes |" in text
    assert "Left out: nginx is not installed." in text
    assert "![CPU of each system](gateway.png)" in text
    assert "errors, so" not in text


def test_a_report_without_the_reference_has_no_ratios() -> None:
    text = "\n".join(report([OURS], [], "Made here.", drawn=False))
    assert "No ratios: sglang-router was not measured." in text
    assert "gateway.png" not in text


def test_a_report_compares_with_the_version_before() -> None:
    before = replace(OURS, name=BEFORE, short_us=50.0, rounds=[(50.0, 80.0, 10.0), (60.0, 100.0, 20.0), (80.0, 90.0, 15.0)])
    ours = replace(OURS, rounds=[(45.0, 80.0, 15.0), (60.0, 90.0, 30.0), (60.0, 90.0, 15.0)])
    text = "\n".join(report([before, ours], [], "Made here.", drawn=False))
    assert "| the least of the rounds | 0.90 | 1.00 | 1.00 |" in text
    assert "| the median of the rounds' ratios | 0.90 | 1.00 | 1.50 |" in text
    assert "| *kept by the least?* | yes | yes | yes |" in text
    assert "**no**" in "\n".join(report([before, replace(ours, chunk_us=16.0)], [], "Made here.", drawn=False))
    assert "Multiples of what" not in "\n".join(report([ours], [], "Made here.", drawn=False))


def test_a_system_with_errors_is_named_with_them() -> None:
    text = "\n".join(report([REFERENCE, replace(OURS, errors={"status 503": 2})], [], "Made here.", drawn=False))
    assert "**warmroute made errors, so its figures do not count: 2 x status 503.**" in text
    assert "| 120 | 2 |" in text


def test_a_score_takes_the_least_cpu_and_the_median_wait() -> None:
    def turn(us: float, added: float, errors: dict[str, int]) -> Turn:
        part = LoadResult(good=10, errors={}, rate=1e6 / us, busy=us / 100, each=us)
        return Turn(part, part, part, Wait(500.0, added, added * 2, errors))

    found = score(
        "x", "1", [turn(50, 0.003, {}), turn(40, 0.001, {"cut off": 1}), turn(60, 0.002, {"cut off": 2})], 10**6, 10**7
    )
    assert (found.short_us, found.rate, found.busy) == (40, 25_000, 0.4)
    assert (found.added_p50_ms, found.added_p99_ms) == pytest.approx((2.0, 4.0))
    assert (found.rss_mb, found.peak_mb, found.errors) == (1.0, 10.0, {"cut off": 3})
    assert found.rounds == [(50, 50, 50), (40, 40, 40), (60, 60, 60)]


def test_the_picture_is_drawn_or_left_out(tmp_path: Path) -> None:
    assert not draw(tmp_path / "no.png", [])
    pytest.importorskip("matplotlib")
    assert draw(tmp_path / "gateway.png", [REFERENCE, OURS])
    assert (tmp_path / "gateway.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "apache"])
    assert "'apache' is not one of warmroute, warmroute-plain, sglang-router" in capsys.readouterr().err


def test_every_system_has_its_installation() -> None:
    assert [system.install for system in SYSTEMS if system.name in ("smg", "nginx")] == [
        "`pip install smg`",
        "`apt-get install nginx`",
    ]
    assert all(system.path for system in SYSTEMS if not system.program and system.name != "warmroute"), "that needs compiling"


def test_a_run_measures_a_real_system_without_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "warmroute-plain", "--out", str(tmp_path)], TINY)
    text = (tmp_path / "gateway.md").read_text("utf-8")
    assert capsys.readouterr().out == text
    found = json.loads((tmp_path / "gateway.json").read_text("utf-8"))
    assert found["missing"] == []
    (one,) = found["scores"]
    assert (one["name"], one["errors"]) == ("warmroute-plain", {})
    assert min(one[key] for key in ("short_us", "long_us", "chunk_us", "rate", "stream_rate")) > 0
    assert one["peak_mb"] >= one["rss_mb"] > 10
    assert [turn["short"]["good"] for turn in one["turns"]] == [60]
