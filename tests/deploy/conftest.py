"""What the deployment tests share: the repository's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tools import ROOT


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def values() -> dict[str, Any]:
    """The chart's values.yaml."""
    loaded = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded
