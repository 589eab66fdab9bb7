"""A table that is drawn anew from rows, keeps its cursor on the same row, and has as many columns as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widgets import DataTable

from gateway.commands.top.columns import Column, fitted

MOST_WANTED: Final = 40  # characters


class Line(NamedTuple):
    """A row. cells: (text, style) for every column, shown or not."""

    key: str
    cells: Sequence[tuple[str, str]]


class Rows(DataTable[Text]):
    """See the top of this file. Texts are shown as they are: no markup."""

    def __init__(self, columns: Sequence[Column], **options: Any) -> None:
        super().__init__(cursor_type="row", zebra_stripes=True, **options)
        self._all = columns
        self._shown: list[tuple[int, int]] = []
        self._heads: tuple[int, bool] | None = None
        self._lines: list[Line] = []
        self._sorted: tuple[int, bool] | None = None
        self._wanted = [0] * len(columns)  # never less than before, or the columns would move about

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    def show(self, lines: Sequence[Line], by: tuple[int, bool] | None = None) -> None:
        """by: the column that they are sorted by, and whether the highest is first. Draws what has changed only."""
        lines = list({line.key: line for line in lines}.values())  # each key once
        if lines != self._lines or by != self._sorted:
            before, self._lines, self._sorted = self._lines, lines, by
            for line in lines:
                self._wanted = [max(known, cell_len(text)) for known, (text, _) in zip(self._wanted, line.cells, strict=True)]
            self._draw(before)

    @property
    def chosen(self) -> str | None:
        """The key of the row with the cursor."""
        return self._lines[self.cursor_row].key if 0 <= self.cursor_row < len(self._lines) else None

    @property
    def texts(self) -> list[list[str]]:
        """What is in it, row by row."""
        return [[str(cell) for cell in self.get_row_at(at)] for at in range(self.row_count)]

    def _draw(self, before: Sequence[Line] = ()) -> None:
        width = self.scrollable_content_region.width
        if width <= 0:
            return  # it is hidden, and is told when it no longer is
        shown = fitted(self._all, width, [min(each, MOST_WANTED) for each in self._wanted])
        heads = (shown, self._sorted)
        if heads != (self._shown, self._heads) or not self.columns:
            self._anew(shown)
        elif [line.key for line in before] == [line.key for line in self._lines]:
            self._update(before)
        else:
            self._fill()

    def _anew(self, shown: list[tuple[int, int]]) -> None:
        self._shown, self._heads = shown, self._sorted
        key, top = self._place()
        self.clear(columns=True)
        for at, width in shown:
            column = self._all[at]
            arrow = ""
            if self._sorted and self._sorted[0] == at:
                arrow = "▼" if self._sorted[1] else "▲"
            label = Text(f"{column.name}{arrow}"[:width], justify="right" if column.right else "left")
            self.add_column(label, width=width, key=str(at))
        self._add(key, top)

    def _fill(self) -> None:
        key, top = self._place()
        self.clear()
        self._add(key, top)

    def _place(self) -> tuple[str | None, float]:
        """The row with the cursor, None if it is the first one; where the table is scrolled to."""
        at = self.cursor_row
        key = self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value if 0 < at < self.row_count else None
        return key, self.scroll_y

    def _add(self, key: str | None, top: float) -> None:
        found = 0
        for number, line in enumerate(self._lines):
            self.add_row(*self._cells(line), key=line.key)
            if line.key == key:
                found = number
        if found:
            self.move_cursor(row=found, scroll=False)
            self.scroll_to(y=top, animate=False, force=True)

    def _update(self, before: Sequence[Line]) -> None:
        for old, line in zip(before, self._lines, strict=True):
            if old.cells != line.cells:
                for (at, _), cell in zip(self._shown, self._cells(line), strict=True):
                    if old.cells[at] != line.cells[at]:
                        self.update_cell(line.key, str(at), cell)

    def _cells(self, line: Line) -> list[Text]:
        made = []
        for at, width in self._shown:
            text, style = line.cells[at]
            cell = Text(text, style=style, justify="right" if self._all[at].right else "left", no_wrap=True)
            cell.truncate(width, overflow="ellipsis")
            made.append(cell)
        return made
