"""Rules about all files: each is one test, which names every file that violates it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nobody(faults: Iterable[str]) -> None:
    """Fails with all violations, one per line."""
    found = list(faults)
    assert not found, "\n".join(found)
