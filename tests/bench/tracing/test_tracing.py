"""The bench of traces, as small as it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.tracing.__main__ import main
from tests.support.tiers import nightly


@nightly("spans and exporter: tests/gateway/telemetry/tracing, request/tracing")
def test_it_measures_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "3", "--rounds", "1", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "tracing.md").read_text("utf-8")
    assert text == capsys.readouterr().out.removesuffix("\n")
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| o")] == [
        "| off",
        "| on, not drawn",
        "| on, a traceparent that is not sampled",
        "| on, each request traced",
        "| on, each request traced, the collector is gone",
    ]
