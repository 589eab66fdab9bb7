"""Writes dashboards/*.json, and the tables of panels in docs/dashboards.md.

python -m scripts.dashboards
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scripts.dashboards.board import Board, json_of
from scripts.dashboards.fleet import FLEET
from scripts.dashboards.money import MONEY
from scripts.dashboards.router import ROUTER

ROOT: Final = Path(__file__).parent.parent.parent
FOLDER: Final = ROOT / "dashboards"
PAGE: Final = ROOT / "docs" / "dashboards.md"
BEGIN, END = "<!-- panels: made by scripts/dashboards -->", "<!-- end of panels -->"
BOARDS: Final = (FLEET, MONEY, ROUTER)


def texts() -> dict[str, str]:
    """The files, by name."""
    return {f"{board.name}.json": json.dumps(json_of(board), indent=2) + "\n" for board in BOARDS}


def page(text: str) -> str:
    """The page with new tables. text: its present contents."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks the lines {BEGIN!r} and {END!r}")
    tables = "\n".join(line for board in BOARDS for line in _table(board))
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def _table(board: Board) -> Iterator[str]:
    yield f"## {board.title.removeprefix('Warmroute: ').capitalize()}"
    yield ""
    yield f"[`{board.name}.json`](../dashboards/{board.name}.json). {board.question}"
    yield ""
    yield "| row | panels |"
    yield "|---|---|"
    for row in board.rows:
        yield f"| {row.title} | {'; '.join(panel.title for panel in row.panels)} |"
    yield ""


def main() -> int:
    for name, text in texts().items():
        (FOLDER / name).write_text(text, "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
