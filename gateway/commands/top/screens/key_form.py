"""A new key: what it may do, as an operator writes it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Button, Input, Label, Static

from gateway.commands.operate import OperatorError
from gateway.commands.top.screens.dialogs import Dialog, titled
from gateway.commands.top.values import Json, text

FIELDS: Final = (
    ("tenant", "Tenant", "whose it is"),
    ("name", "Name", "what lists show"),
    ("models", "Models", "with commas; none: all"),
    ("pools", "Pools", "with commas; none: all"),
    ("budget_usd_day", "USD a day", "no limit"),
    ("budget_usd_month", "USD a month", "no limit"),
    ("requests_per_minute", "Requests a minute", "no limit"),
    ("uncached_tokens_per_minute", "Uncached tokens/min", "no limit"),
    ("priority", "Priority", "0"),
    ("expires_at", "Expires", "2031-01-31; none: never"),
)
_LISTS: Final = ("models", "pools")
_WHOLE: Final = ("requests_per_minute", "uncached_tokens_per_minute", "priority")
_AMOUNTS: Final = ("budget_usd_day", "budget_usd_month")


def settings(given: Mapping[str, str]) -> Json:
    """Of a key, as POST /warmroute/keys takes them. Raises ValueError."""
    made: Json = {}
    for name, title, _ in FIELDS:
        value = given.get(name, "").strip()
        if not value:
            continue
        if name in _LISTS:
            made[name] = [part.strip() for part in value.split(",") if part.strip()]
        elif name in _WHOLE or name in _AMOUNTS:
            made[name] = _number(title, value, whole=name in _WHOLE)
        else:
            made[name] = value
    if "tenant" not in made:
        raise ValueError("Tenant is needed: whose key it is")
    return made


def _number(title: str, value: str, *, whole: bool) -> float:
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{title}: a {'whole ' if whole else ''}number is expected, got {value!r}")
    return number


class KeyForm(Dialog[Json]):
    """What a new key may do. It stays open until the gateway has made the key."""

    def __init__(self, create: Callable[[Json], Awaitable[Json]]) -> None:
        super().__init__()
        self._create = create
        self._busy = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box wide", can_focus=False):
            yield titled("New key")
            for name, title, hint in FIELDS:
                with Horizontal(classes="field"):
                    yield Label(title, markup=False)
                    yield Input(placeholder=hint, id=f"field-{name}", max_length=2000, compact=True)
            yield Static(id="form-problem", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="no", compact=True)
                yield Button("Make the key", id="make", variant="primary", compact=True)

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        self.make()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "make":
            self.make()
        else:
            self.dismiss(None)

    @work
    async def make(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            given = {name: self.query_one(f"#field-{name}", Input).value for name, _, _ in FIELDS}
            self.dismiss(await self._create(settings(given)))
        except (ValueError, OperatorError) as error:
            self.query_one("#form-problem", Static).update(Text(text(str(error), 400), style="bold red"))
        finally:
            self._busy = False
