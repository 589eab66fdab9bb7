"""The bench of the prefix cache, with a simulated engine: its HTTP, its counts, its report."""

from __future__ import annotations

import json
from pathlib import Path

from bench.replica.prefix import main


def test_a_run_counts_what_is_found_again(tmp_path: Path) -> None:
    run = ["--sizes", "64,200", "--rounds", "1", "--tries", "4", "--replica", "--engine sim", "--out", str(tmp_path)]
    assert main(run) == 0
    results = json.loads((tmp_path / "prefix.json").read_text("utf-8"))
    assert [(size["tokens"], size["cached"]) for size in results["sizes"]] == [(64, 48), (200, 192)]
    tries = results["tries"]
    assert tries["blocks"] == tries["again"] == tries["resampled"] > 0
    assert tries["whole_again"] == tries["whole_resampled"] == 4
    assert "| 200 | 192 |" in (tmp_path / "prefix.md").read_text("utf-8")
