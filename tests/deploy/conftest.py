"""What the deployment tests share: the repository's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import Helm
from tests.support.tiers import nightly
from tests.support.tools import ROOT, tool


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def values() -> dict[str, Any]:
    """The chart's values.yaml."""
    loaded = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(params=["helm", pytest.param("helm3", marks=nightly("helm 3 says the same as helm 4: test_chart.py"))])
def helm(request: pytest.FixtureRequest, tmp_path: Path) -> Helm:
    return Helm(tool(request.param), tmp_path)
