"""Rules about all files: one test each, which names every file that breaks it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.paths import ROOT


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nobody(faults: Iterable[str]) -> None:
    """Fails with all of them, a line each."""
    found = list(faults)
    assert not found, "\n".join(found)
