"""The table of what works, as the tests have found it. Written to build/engines.md, and shown at their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.engines.live import Kind
from tests.support.paths import ROOT

OUT: Path = ROOT / "build" / "engines.md"


class Table:
    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], str] = {}
        self._kinds: list[Kind] = []

    def found(self, kind: Kind, what: str, result: str) -> None:
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._cells[what, kind.name] = result

    def lines(self, order: Sequence[str]) -> list[str]:
        names = [kind.name for kind in self._kinds]
        rows = [["", *(f"{kind.name} ({kind.version})" for kind in self._kinds)], ["---"] * (len(names) + 1)]
        rows += [[what, *(self._cells.get((what, name), "not tested") for name in names)] for what in order]
        return [f"| {' | '.join(row)} |" for row in rows]

    def write(self, order: Sequence[str]) -> str:
        text = "\n".join(self.lines(order)) + "\n"
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(text, "utf-8")
        return text
