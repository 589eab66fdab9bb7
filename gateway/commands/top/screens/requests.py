"""Requests as they happen, the newest first. Enter: why one went where it went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final
from urllib.parse import quote

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Input, Static

from gateway.commands.operate import OperatorError
from gateway.commands.top.access import Access
from gateway.commands.top.answers import PARTS, Candidate, Decision
from gateway.commands.top.columns import Column
from gateway.commands.top.rows import Request
from gateway.commands.top.screens.dialogs import Dialog, listed, titled
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.screens.tables import Line, Rows
from gateway.commands.top.state import Live
from gateway.commands.top.values import clock, count, duration, inside, money, percent, rate, share, short

COLUMNS: Final = (
    Column("time", 8),
    Column("status", 7),
    Column("model", 8, 3, grows=True),
    Column("tenant", 6, 5, grows=True),
    Column("replica", 12, grows=True),
    Column("why", 7, 1, grows=True),
    Column("prompt", 7, 2, right=True),
    Column("cached", 6, right=True),
    Column("TTFT", 7, 4, right=True),
    Column("whole", 7, 6, right=True),
    Column("cost", 8, 7, right=True),
)
# Of every candidate; the parts of its cost are between these.
BEFORE: Final = (Column("replica", 10, grows=True), Column("cost", 7, right=True))
BEHIND: Final = (Column("match", 6, 1, right=True), Column("running", 7, 2, right=True))
REASONS: Final = {
    "warm": "it holds the longest match of this prompt, and costs least",
    "spill": "it costs least, although another replica holds more of this prompt",
    "cold": "it costs least; no replica holds any of this prompt",
    "blind": "it costs least; the prompt is too short to be matched",
    "session": "it costs least, with what it probably holds of the session",
}


def tone(row: Request) -> str:
    if not row.ended:
        return "cyan"
    if row.failed:
        return "bold red"
    return "yellow" if (row.status or 0) >= 400 else "green"


def line(row: Request) -> Line:
    mark = "≈" if row.guessed or row.estimated else ""
    cached = share(row.cached or 0.0, row.prompt or 0.0)
    prompt = f"{mark}{short(row.prompt)}" if row.prompt is not None else "–"
    texts = [row.model, row.tenant, row.replica, row.why, prompt]
    texts += [f"{mark}{percent(cached)}" if cached is not None else "–", duration(row.ttft_s), duration(row.seconds)]
    return Line(
        row.key, [(clock(row.time), ""), (row.outcome, tone(row)), *((each, "") for each in texts), (money(row.cost_usd), "")]
    )


def matches(row: Request, wanted: str) -> bool:
    """wanted: in small letters."""
    fields = (row.id, row.model, row.tenant, row.api_key, row.replica, row.pool, row.why, row.outcome, row.endpoint)
    return not wanted or any(wanted in field.lower() for field in fields)


class RequestRows(Rows):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Explain")]


class Requests(Pane):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause", "Pause"),
        Binding("slash", "find", "Find"),
    ]

    stopped: Sequence[Request] | None = None

    def __init__(self, access: Access, live: Live, **options: Any) -> None:
        super().__init__(access, live, **options)
        self.table = RequestRows(COLUMNS, id="request-rows")
        hint = "part of an id, model, tenant, key, replica, status; Escape ends it"
        self.wanted = Input(placeholder=hint, id="wanted", compact=True)
        self.wanted.display = False

    def compose(self) -> ComposeResult:
        yield self.wanted
        yield self.table
        yield self.note

    def show(self) -> None:
        rows = self.stopped if self.stopped is not None else list(self.live.requests.values())
        wanted = self.wanted.value.strip().lower()
        found = sorted([row for row in rows if matches(row, wanted)], key=lambda row: -(row.time or 0.0))
        self.table.show([line(row) for row in found])
        self.note.update(self._note(len(found), len(rows)))

    def _note(self, found: int, whole: int) -> str:
        totals = self.live.totals(10)
        ends = rate(totals.requests / totals.seconds if totals.seconds else 0.0)
        parts = [f"{ends} requests/s end, the last {whole} are here"]
        if self.stopped is not None:
            parts.insert(0, "PAUSED, space goes on")
        if found < whole:
            parts.append(f"{found} of {whole} match")
        if self.live.shown_share < 1:
            parts.append(f"{percent(self.live.shown_share)} of them are shown, for there are many")
        if not whole:
            parts.append("No request yet since this gateway is watched")
        return "  ·  ".join(parts)

    def action_pause(self) -> None:
        self.stopped = list(self.live.requests.values()) if self.stopped is None else None
        self.show()

    def action_find(self) -> None:
        self.wanted.display = True
        self.wanted.focus()

    def on_input_changed(self, _event: Input.Changed) -> None:
        self.show()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self.table.focus()

    def key_escape(self) -> None:
        self.wanted.value, self.wanted.display = "", False
        self.table.focus()

    def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        self.action_explain()

    @work
    async def action_explain(self) -> None:
        rows = self.stopped if self.stopped is not None else self.live.requests.values()
        row = next((row for row in rows if row.key == self.table.chosen), None)
        if row is None:
            return
        try:
            found = await self.access.call("GET", f"/warmroute/live/requests/{quote(row.key, safe='')}")
        except OperatorError as error:
            if error.status != 404:
                self.say(str(error), wrong=True)
                return
            self.app.push_screen(
                Explained(row, None, "Its decision is no longer kept: the gateway keeps the last few hundred.")
            )
            return
        decision = Decision.of(inside(found.get("decision"))) if found.get("decision") else None
        self.app.push_screen(Explained(Request.of(inside(found.get("request"))), decision, "It has reached no replica."))


def about(row: Request) -> list[tuple[str, str]]:
    """What is known of a request."""
    about_tokens = " (by the index, until it is counted)" if row.guessed else ""
    tokens = f"{count(row.prompt)} prompt, {count(row.cached)} cached, {count(row.completion)} answer{about_tokens}"
    times = f"queue {duration(row.queued_s)}, first token {duration(row.ttft_s)}, whole {duration(row.seconds)}"
    return [
        ("Request", row.id),
        ("Time", f"{clock(row.time)}  {row.endpoint}"),
        ("Model", row.model),
        ("Tenant", row.tenant),
        ("API key", row.api_key),
        ("Replica", f"{row.replica}  {row.pool}"),
        ("Fallback", row.fallback),
        ("Tokens", tokens if row.prompt is not None else ""),
        ("Estimated", row.estimated),
        ("Times", times if row.ended else ""),
        ("Money", f"cost {money(row.cost_usd)}, saved {money(row.saved_usd)}" if row.cost_usd is not None else ""),
        ("Status", row.outcome),
        ("Error", f"{row.code} {row.error}"),
        ("Failed", "; ".join(row.attempts)),
        ("Resumed", f"{count(row.resumed)} times" if row.resumed else ""),
    ]


def costs(decision: Decision) -> tuple[list[Column], list[Line]]:
    """Of its candidates. Parts that are nothing for all of them have no column."""
    there = [at for at in range(len(PARTS)) if any(candidate.parts[at] for candidate in decision.candidates)]
    parts = [Column(PARTS[at][1], 7, 3 + at, right=True) for at in there]
    lines = [_costs(number, each, decision.replica, there) for number, each in enumerate(decision.candidates)]
    return [*BEFORE, *parts, *BEHIND], lines


def _costs(number: int, candidate: Candidate, chosen: str, there: Sequence[int]) -> Line:
    best = candidate.replica == chosen
    there_parts = [candidate.parts[at] for at in there]
    parts = [(duration(part) if part else "·", "" if part else "dim") for part in there_parts]
    cells = [
        (f"{'► ' if best else '  '}{candidate.replica}", "bold" if best else ""),
        (duration(candidate.total_s), "bold"),
        *parts,
    ]
    return Line(str(number), [*cells, (short(candidate.matched_tokens), ""), (count(candidate.inflight), "")])


class Explained(Dialog[None]):
    """A request, and every candidate's cost."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter", "leave", "Close", show=False)]

    def __init__(self, row: Request, decision: Decision | None, nothing: str) -> None:
        super().__init__()
        self._row = row
        self._decision = decision
        self._nothing = nothing

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box wide"):
            yield titled("Why it went there")
            yield Static(listed(about(self._row)))
            if self._decision is None:
                yield Static(Text(self._nothing), classes="reason")
            else:
                yield Static(Text(why(self._decision)), classes="reason")
                yield Rows(costs(self._decision)[0], id="candidates")
            yield Static(Text("Costs are times; the lowest is chosen (docs/routing.md). Escape closes", style="dim"))

    def on_mount(self) -> None:
        if self._decision:
            self.query_one(Rows).show(costs(self._decision)[1])


def why(decision: Decision) -> str:
    reason = REASONS.get(decision.reason, decision.reason)
    available = (
        f"{count(decision.available_tokens)} of {count(decision.prompt_tokens)} prompt tokens were in a cache of some replica"
    )
    further = f"; {count(decision.further)} further candidates" if decision.further else ""
    return f"{decision.policy} chose {decision.replica}: {reason}. {available}{further}."
