"""The replicas: load, health, what they hold; drained and undrained here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from gateway.commands.top.access import Access
from gateway.commands.top.bars import gauge
from gateway.commands.top.columns import Column
from gateway.commands.top.rows import Replica
from gateway.commands.top.screens.dialogs import Confirm, Facts
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.screens.tables import Line, Rows
from gateway.commands.top.state import Live
from gateway.commands.top.values import count, percent, short

COLUMNS: Final = (
    Column("replica", 16, grows=True),
    Column("pool", 7, 6, grows=True),
    Column("state", 8, grows=True),
    Column("running", 7, right=True),
    Column("waiting", 7, 4, right=True),
    Column("prefill", 7, 3, right=True),
    Column("rate/s", 6, 7, right=True),
    Column("KV", 8, 8),
    Column("held/capacity", 14, 1, right=True),
    Column("full", 5, 2, right=True),
    Column("cached", 6, right=True),
    Column("engine", 10, 9, grows=True),
)
# What a column is sorted by, and whether the highest is first; names are, where there is nothing else.
ORDERS: Final[Sequence[tuple[Callable[[Replica], float | str], bool]]] = (
    (lambda row: row.name, False),
    (lambda row: row.pool, False),
    (lambda row: row.state, False),
    (lambda row: row.inflight, True),
    (lambda row: row.waiting or 0.0, True),
    (lambda row: row.booked_tokens, True),
    (lambda row: row.tokens_per_second or 0.0, True),
    (lambda row: row.filled or 0.0, True),
    (lambda row: row.held_tokens, True),
    (lambda row: row.filled or 0.0, True),
    (lambda row: row.cached or 0.0, True),
    (lambda row: row.engine, False),
)
_TONES: Final = {"up": "green", "down": "bold red", "draining": "yellow", "leaving": "yellow"}


def line(row: Replica) -> Line:
    name = (row.name, "bold" if row.up else "")
    state = (row.state, _TONES.get(row.state, "yellow"))
    held = f"{short(row.held_tokens)}/{short(row.capacity_tokens) if row.capacity_tokens else '?'}"
    numbers = (count(row.inflight), short(row.waiting), short(row.booked_tokens), short(row.tokens_per_second))
    cells = [name, (row.pool or "(leaving)", ""), state, *((each, "") for each in numbers)]
    cells += [
        (gauge(row.filled, 8), "cyan"),
        (held, ""),
        (percent(row.filled), ""),
        (percent(row.cached), ""),
        (row.engine, "dim"),
    ]
    return Line(row.key, cells)


def facts(row: Replica) -> list[tuple[str, str]]:
    room = (
        f"{percent(row.filled)} of {count(row.capacity_tokens)}" if row.capacity_tokens else "how many it can hold is unknown"
    )
    more = f" and {count(row.further_models)} more" if row.further_models else ""
    return [
        ("Replica", row.name),
        ("URL", row.url),
        ("Pool", row.pool),
        ("From", row.source),
        ("State", row.state),
        ("Circuit", row.circuit),
        ("Error", row.error),
        ("Engine", row.engine),
        ("Models", ", ".join(row.models) + more),
        ("Running", f"{count(row.inflight)}, of which {count(row.decoding)} decode"),
        ("Waiting", f"{count(row.waiting)} in the engine's queue" if row.waiting is not None else ""),
        ("Prefill", f"{count(row.booked_tokens)} tokens ahead, at {count(row.tokens_per_second)} tokens/s"),
        ("Holds", f"{count(row.held_tokens)} tokens; {room}"),
        ("Cached", f"{percent(row.cached)} of {count(row.prompt_tokens)} prompt tokens"),
    ]


class ReplicaRows(Rows):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]


class Replicas(Pane):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "Drain"),
        Binding("u", "undrain", "Undrain"),
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "sort(-1)", "Sort back", show=False),
        Binding("R", "reverse", "Reverse", show=False),
    ]

    by = 0
    highest_first = False

    def __init__(self, access: Access, live: Live, **options: Any) -> None:
        super().__init__(access, live, **options)
        self.table = ReplicaRows(COLUMNS, id="replica-rows")

    def compose(self) -> ComposeResult:
        yield self.table
        yield self.note

    def show(self) -> None:
        order, _ = ORDERS[self.by]
        rows = sorted(self.live.replicas, key=lambda row: (row.pool, row.name))
        rows.sort(key=order, reverse=self.highest_first)
        self.table.show([line(row) for row in rows], (self.by, self.highest_first))
        loads = [
            f"{pool.name}: {count(pool.running)} running of {count(pool.limit)}, {count(pool.waiting)} waiting"
            for pool in self.live.pools[:8]
        ]
        if self.live.further_replicas:
            loads.append(f"{count(self.live.further_replicas)} further replicas are not shown")
        if not rows and self.live.version:
            loads.append("There are no replicas: add them in the configuration, or by `discovery`")
        self.note.update("  ·  ".join(loads))

    @property
    def chosen(self) -> Replica | None:
        key = self.table.chosen
        return next((row for row in self.live.replicas if row.key == key), None)

    # -- what an operator does

    def action_sort(self, step: int) -> None:
        """By the next column that is shown."""
        shown = sorted({int(str(key.value)) for key in self.table.columns})
        if shown:
            at = shown.index(self.by) if self.by in shown else 0
            self._sort(shown[(at + step) % len(shown)])

    def action_reverse(self) -> None:
        self.highest_first = not self.highest_first
        self.show()

    def _sort(self, column: int) -> None:
        self.highest_first = not self.highest_first if column == self.by else ORDERS[column][1]
        self.by = column
        self.show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self._sort(int(str(event.column_key.value)))

    def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        if row := self.chosen:
            self.app.push_screen(Facts(f"Replica {row.name}", facts(row)))

    def action_drain(self) -> None:
        self._drain(on=True)

    def action_undrain(self) -> None:
        self._drain(on=False)

    @work
    async def _drain(self, *, on: bool) -> None:
        row = self.chosen
        if row is None:
            return
        others = [each for each in self.live.replicas if each.pool == row.pool and each.name != row.name and each.state == "up"]
        if on:
            about = f"It gets no new requests. What runs there ({count(row.inflight)}) finishes."
            if not others:
                about += " No other replica of this pool takes requests: its clients will wait, or get errors."
            question = Confirm(f"Drain {row.name}?", about, "Drain")
        else:
            question = Confirm(f"Undrain {row.name}?", "It gets requests again.", "Undrain")
        if not await self.app.push_screen_wait(question):
            return
        answer = await self.ask("POST", "/warmroute/drain" if on else "/warmroute/undrain", {"name": row.name})
        if answer is None:
            return
        still = answer.get("draining") is True
        done = "gets no new requests" if still else "gets requests"
        if still and not on:
            done = "still gets no new requests, for the source that found it drains it"
        self.say(f"{row.name} {done}.")
