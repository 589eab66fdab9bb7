"""The report of agreement names tests that exist."""

from __future__ import annotations

import re
from typing import Final

from tests.support.paths import ROOT

REPORT: Final = ROOT / "bench/reports/agreement.md"


def test_each_named_test_exists() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", REPORT.read_text("utf-8"))
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text("utf-8")]
    assert len(named) > 80
    assert missing == []
