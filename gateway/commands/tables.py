"""Prints tables on standard output: one line per row, aligned with spaces; on a terminal the header is bold.

Lines are never folded; a terminal that is too narrow wraps them. Imported only by commands that print a table: rich takes some
tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_UNBOUNDED = 10_000  # characters of a line


def text(name: str, width: int | None = None) -> Column:
    """A column of texts. width: minimum; rows printed one by one need it for alignment."""
    return Column(name, min_width=width, no_wrap=True)


def number(name: str, width: int | None = None) -> Column:
    """A column of numbers. width: see `text`."""
    return Column(name, justify="right", min_width=width, no_wrap=True)


def console(width: int | None = _UNBOUNDED) -> Console:
    """Standard output. width: None: the terminal's, which cuts longer lines."""
    return Console(width=width, highlight=False, markup=False, emoji=False)


def line(text: str) -> Text:
    """A line of text beside tables."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def table(columns: Iterable[Column], rows: Iterable[Sequence[str]], *, header: bool = True) -> Table:
    made = Table(*columns, box=None, pad_edge=False, padding=(0, 1), show_header=header, header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made


def print_table(columns: Iterable[Column], rows: Iterable[Sequence[str]], *, header: bool = True) -> None:
    """Print a table. header: False for further rows of a table that is printed row by row."""
    console().print(table(columns, rows, header=header))
