"""The programs that `scripts/tools.sh` fetches."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.paths import ROOT


def tool(name: str) -> Path:
    """The program from .tools/bin, PATH or /usr/sbin. Without it the test is skipped, or fails if tools are required."""
    local = ROOT / ".tools" / "bin" / name
    if local.exists():
        return local
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    return Path(found or missing(f"{name} is missing: run scripts/tools.sh"))


def missing(reason: str) -> NoReturn:
    """Skips the test, or fails it where WARMROUTE_REQUIRE_TOOLS=1."""
    if os.environ.get("WARMROUTE_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
