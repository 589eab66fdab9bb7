"""What the deployment tests share: the repository's files and the tools that `scripts/tools.sh` fetches."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def tool(name: str) -> Path:
    """The program from .tools/bin or PATH; without it the test is skipped, or fails where it has to run."""
    local = ROOT / ".tools" / "bin" / name
    if local.exists():
        return local
    return Path(shutil.which(name) or missing(f"{name} is missing: run scripts/tools.sh"))


def missing(reason: str) -> NoReturn:
    """Skips the test, or fails it where WARMROUTE_REQUIRE_TOOLS=1."""
    if os.environ.get("WARMROUTE_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def values() -> dict[str, Any]:
    """The chart's values.yaml."""
    loaded = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded
