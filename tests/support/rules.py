"""Rules about all files: each is one test, which names every file that violates it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.paths import ROOT


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def nobody(faults: Iterable[str]) -> None:
    """Fails with all violations, one per line."""
    found = list(faults)
    assert not found, "\n".join(found)
