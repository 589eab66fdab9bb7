"""Writes the tables of values in helm/README.md from the comments in helm/values.yaml.

python -m scripts.chart_readme

In values.yaml `# --` and the comment lines after it describe the key below them, as does a comment behind a key. `## TITLE`
begins a section. A key that is described and has none described below it is one row, with all that is in it as the default.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "helm"
BEGIN, END = "<!-- values: made by scripts/chart_readme.py -->", "<!-- end of values -->"

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?P<rest>.*)$")
_BEHIND = re.compile(r"\s#\s+(?P<dashes>-- )?(?P<text>.*)$")


class Undescribed(ValueError):
    """A value has no description."""


@dataclass(frozen=True, slots=True)
class Value:
    """One key of values.yaml. path: dotted. text: its description, or "" if it has none."""

    section: str
    path: str
    text: str


def described(text: str) -> Iterator[Value]:
    """The keys of block mappings in values.yaml, in their order."""
    section, above = "", list[str]()
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("## "):
            section = bare.removeprefix("## ")
        if bare.startswith("# -- "):
            above = [bare.removeprefix("# -- ")]
        elif bare.startswith("# ") and above:
            above.append(bare.removeprefix("# "))
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            parents = [*(each for each in parents if each[0] < indent), (indent, match["key"])]
            behind = _BEHIND.search(match["rest"])
            yield Value(section, ".".join(key for _, key in parents), " ".join([*above, *([behind["text"]] if behind else [])]))
            above = []
        else:
            above = []


def rows(values: Mapping[str, Any], keys: Sequence[Value]) -> Iterator[tuple[Value, Any]]:
    """The keys that have a row, with their defaults. Raises Undescribed."""
    for each in keys:
        default = _at(values, each.path)
        inside = [other for other in keys if other.path.startswith(f"{each.path}.")]
        if any(part.text for part in inside):
            continue  # they have rows of their own
        if each.text:
            yield each, default
        elif not inside and not _has_a_row(each.path, keys):
            raise Undescribed(f"helm/values.yaml: {each.path} needs a description: a comment behind it, or '# -- ' above it")


def _has_a_row(path: str, keys: Sequence[Value]) -> bool:
    """Return whether a key above it is described: then it is part of that key's row."""
    return any(path.startswith(f"{each.path}.") and each.text for each in keys)


def _at(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values[key]
    return values


def table(text: str) -> str:
    """The Markdown of all sections."""
    keys = list(described(text))
    lines, section = list[str](), ""
    for value, default in rows(yaml.safe_load(text), keys):
        if value.section != section:
            section = value.section
            lines += [*([""] if lines else []), f"### {section}", "", "| value | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{value.path}` | `{shown(default)}` | {value.text} |")
    return "\n".join(lines)


def shown(default: Any) -> str:
    """As YAML in one line."""
    if isinstance(default, str):
        return default if default and not re.fullmatch(r"[\d.]+", default) else f'"{default}"'
    return str(yaml.safe_dump(default, default_flow_style=True, width=1_000_000, sort_keys=False)).removesuffix("...\n").strip()


def readme(page: str, values: str) -> str:
    """The page with the tables for these values."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(values)}\n\n{END}{after}"


if __name__ == "__main__":
    FILE = CHART / "README.md"
    FILE.write_text(readme(FILE.read_text("utf-8"), (CHART / "values.yaml").read_text("utf-8")), "utf-8")
    print(f"{FILE} written", file=sys.stderr)
