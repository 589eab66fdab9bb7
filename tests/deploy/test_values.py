"""The chart's documents agree with each other; no tool is needed to see it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from scripts.chart_readme import Undescribed, readme, table
from tests.deploy.conftest import ROOT

CHART = ROOT / "helm"


def test_the_readme_is_what_its_script_makes_of_the_values() -> None:
    page = (CHART / "README.md").read_text("utf-8")
    assert readme(page, (CHART / "values.yaml").read_text("utf-8")) == page, "run: python -m scripts.chart_readme"


def test_comments_become_rows() -> None:
    text = """
## First
# -- Above,
# in two lines
a: 1
b: [] # Behind
# no description
c: # -- As one
  d: x
  e: {f: true}
## Second
g:
  # example: 1
  # -- Inner
  h: ""
  i: "8" # Text
"""
    assert table(text).splitlines() == [
        "### First",
        "",
        "| value | default | meaning |",
        "|---|---|---|",
        "| `a` | `1` | Above, in two lines |",
        "| `b` | `[]` | Behind |",
        "| `c` | `{d: x, e: {f: true}}` | As one |",
        "",
        "### Second",
        "",
        "| value | default | meaning |",
        "|---|---|---|",
        '| `g.h` | `""` | Inner |',
        '| `g.i` | `"8"` | Text |',
    ]


def test_a_value_without_a_description_is_named() -> None:
    with pytest.raises(Undescribed, match=r"helm/values.yaml: a\.c needs a description"):
        table("a:\n  b: 1 # One\n  c: 2\n")


def test_the_readme_lists_every_value_with_its_default(values: dict[str, Any]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|", (CHART / "README.md").read_text("utf-8"), re.MULTILINE)
    documented = {path: yaml.safe_load(default) for path, default in rows}
    assert len(documented) == len(rows), "a value is listed twice"
    assert documented == {path: at(values, path) for path in documented}
    undocumented = [leaf for leaf in leaves(values) if not any(f"{leaf}.".startswith(f"{row}.") for row in documented)]
    assert undocumented == []


def at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'version = "{chart["appVersion"]}"' in project
