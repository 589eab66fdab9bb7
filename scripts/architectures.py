"""Writes the table of architectures in docs/replica.md: tiny random models through the engine, against plain transformers.

python -m scripts.architectures            # needs '.[dev]'; about two minutes
python -m scripts.architectures KIND ...   # prints the rows of these kinds
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "replica.md"
BEGIN, END = "<!-- architectures: made by scripts/architectures.py -->", "<!-- end of architectures -->"


def rows(kinds: Sequence[str]) -> Iterator[str]:
    """Lines of the table, without its head."""
    from tests.replica.architectures import KINDS, row

    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(row(kind, Path(folder)))
        if found.way and not found.right:
            raise SystemExit(f"{kind} is served and its answers are wrong: {found.note}")
        cells = [kind, found.way or "refused", ("yes" if found.cache else "no") if found.way else "", found.note]
        yield "|" + "|".join(f" {cell.replace('|', '/')} " if cell else " " for cell in cells) + "|"


def page(text: str, lines: Sequence[str]) -> str:
    """The page with these lines as its table: one row for all kinds that are served, or refused, alike."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    right = sum("| refused |" not in line for line in lines)
    head = [f"{right} kinds are right, {len(lines) - right} are refused:", "", "| kinds | computed with | prefix cache | |"]
    alike = dict[str, list[str]]()
    for line in lines:
        kind, _, verdict = line.removeprefix("| ").partition(" |")
        alike.setdefault(verdict, []).append(kind)
    table = [f"| {'; '.join(kinds)} |{verdict}" for verdict, kinds in alike.items()]
    return "\n".join([f"{before}{BEGIN}", "", *head, "|---|---|---|---|", *table, "", f"{END}{after}"])


def listed(text: str) -> dict[str, str]:
    """The lines of the page's table, one for each kind."""
    table = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    cells = [
        line.removeprefix("| ").partition(" |") for line in table if line.startswith("| ") and not line.startswith("| kinds ")
    ]
    return {kind: f"| {kind} |{verdict}" for kinds, _, verdict in cells for kind in kinds.split("; ")}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    elif sys.argv[1:]:
        for each in rows(sys.argv[1:]):
            print(each, flush=True)
    else:
        PAGE.write_text(page(PAGE.read_text("utf-8"), list(rows([]))), "utf-8")
        print(f"{PAGE} written", file=sys.stderr)
