"""Keys of clients: whose they are, what they may do, what of their budgets is used; made, rotated and revoked here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Final
from urllib.parse import quote

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from gateway.commands.operate import OperatorError
from gateway.commands.top.answers import Key
from gateway.commands.top.columns import Column
from gateway.commands.top.screens.dialogs import Confirm, Facts, Secret
from gateway.commands.top.screens.key_form import KeyForm
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.screens.tables import Line, Rows
from gateway.commands.top.values import Json, count, money, objects, short, text

EVERY_S: Final = 5.0  # while the screen is visible
MOST_KEYS: Final = 1000
COLUMNS: Final = (
    Column("key", 8),
    Column("tenant", 8, grows=True),
    Column("name", 8, 5, grows=True),
    Column("state", 8),
    Column("models", 8, 7, grows=True),
    Column("requests/min", 12, 4, right=True),
    Column("tokens/min", 10, 6, right=True),
    Column("today", 15, 1, right=True),
    Column("this month", 15, 3, right=True),
)
_TONES: Final = {"valid": "green", "rotating": "yellow", "expired": "red", "revoked": "red"}


def used(spent: float | None, budget: float | None) -> tuple[str, str]:
    """Of a budget."""
    if budget is None:
        return (money(spent) if spent is not None else "–", "")
    part = (spent or 0.0) / budget if budget else 1.0
    return f"{money(spent or 0.0)}/{money(budget)}", "bold red" if part >= 1 else "yellow" if part > 0.8 else ""


def line(key: Key) -> Line:
    rates = [short(each) if each is not None else "–" for each in (key.requests_per_minute, key.tokens_per_minute)]
    cells = [(key.id, "bold"), (key.tenant, ""), (key.name, ""), (key.state, _TONES[key.state]), (key.models, "")]
    cells += [(rates[0], ""), (rates[1], ""), used(key.usd_day, key.budget_day), used(key.usd_month, key.budget_month)]
    return Line(key.id, cells)


def facts(key: Key) -> list[tuple[str, str]]:
    return [
        ("Key", key.id),
        ("Tenant", key.tenant),
        ("Name", key.name),
        ("State", key.state),
        ("Expires", key.expires_at),
        ("Models", key.models),
        ("Pools", key.pools),
        ("Priority", count(key.priority)),
        ("Requests", f"{count(key.requests_per_minute)} a minute" if key.requests_per_minute else "no limit"),
        ("Tokens", f"{count(key.tokens_per_minute)} uncached a minute" if key.tokens_per_minute else "no limit"),
        ("Today", used(key.usd_day, key.budget_day)[0]),
        ("Month", used(key.usd_month, key.budget_month)[0]),
    ]


def _path(key: Key) -> str:
    return f"/warmroute/keys/{quote(key.id, safe='')}"


class KeyRows(Rows):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]


class Keys(Pane):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "create", "New"),
        Binding("r", "rotate", "Rotate"),
        Binding("x", "revoke", "Revoke"),
    ]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.table = KeyRows(COLUMNS, id="key-rows")
        self._keys: list[Key] = []
        self._more = False
        self._asking = False

    def compose(self) -> ComposeResult:
        yield self.table
        yield self.note

    def on_mount(self) -> None:
        self.set_interval(EVERY_S, self.opened)

    def opened(self) -> None:
        if self.display and not self._asking:
            self.load()

    @work
    async def load(self) -> None:
        self._asking, note = True, ""
        try:
            found = await self.access.call("GET", "/warmroute/keys")
        except OperatorError as error:
            note = text(str(error), 300)
            if error.status == 409:
                note += " With `keys: {url: sqlite}` in the configuration each client gets a key of its own (docs/keys.md)."
        else:
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            self._keys = [Key.of(row, now) for row in objects(found.get("keys"), MOST_KEYS)]
            self._more = found.get("has_more") is True
            note = f"{len(self._keys)} keys{', and more' if self._more else ''}  ·  budgets are of days and months in UTC"
            if not self._keys:
                note = "There are no keys yet: n makes the first one"
        finally:
            self._asking = False
        self.table.show([line(key) for key in self._keys])
        self.note.update(note)

    @property
    def chosen(self) -> Key | None:
        chosen = self.table.chosen
        return next((key for key in self._keys if key.id == chosen), None)

    def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        if key := self.chosen:
            self.app.push_screen(Facts(f"Key {key.id}", facts(key)))

    # -- what an operator does

    @work
    async def action_create(self) -> None:
        if made := await self.app.push_screen_wait(KeyForm(self.create)):
            self.secret(made, "It is of")
            self.load()

    async def create(self, settings: Json) -> Json:
        """Raises OperatorError."""
        return await self.access.call("POST", "/warmroute/keys", settings)

    def secret(self, made: Json, about: str) -> None:
        whose = f"{about} {text(made.get('tenant'))}. It is not kept anywhere, and not shown again."
        self.app.push_screen(Secret(f"Key {text(made.get('id'))}", whose, text(made.get("key"), 200)))

    @work
    async def action_rotate(self) -> None:
        if key := self.chosen:
            about = "A new secret is valid at once. The former one goes on for a day, so that clients can change over."
            if await self.app.push_screen_wait(Confirm(f"Rotate {key.id} of {key.tenant}?", about, "Rotate")):
                made = await self.ask("POST", f"{_path(key)}/rotate", {})
                if made:
                    self.secret(made, "This new secret is of")
                self.load()

    @work
    async def action_revoke(self) -> None:
        if key := self.chosen:
            about = "Requests with this key are refused from now on. This cannot be undone."
            if await self.app.push_screen_wait(Confirm(f"Revoke {key.id} of {key.tenant}?", about, "Revoke")):
                if await self.ask("DELETE", _path(key)) is not None:
                    self.say(f"{key.id} is revoked.")
                self.load()
