"""Questions and facts in front of a screen. Escape closes each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

T = TypeVar("T")


class Dialog(ModalScreen[T], Generic[T]):
    """Escape answers None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Close", show=False)]

    def action_leave(self) -> None:
        self.dismiss(None)


def titled(title: str) -> Static:
    return Static(Text(title, style="bold", no_wrap=True, overflow="ellipsis"), classes="title")


class Confirm(Dialog[bool]):
    """True: yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes", show=False),
        Binding("n", "leave", "No", show=False),
        Binding("left,right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, about: str, yes: str) -> None:
        super().__init__()
        self._title = title
        self._about = about
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield titled(self._title)
            yield Static(Text(self._about), classes="about")
            with Horizontal(classes="buttons"):
                yield Button("Cancel (n)", id="no", compact=True)
                yield Button(f"{self._yes} (y)", id="yes", variant="error", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_yes(self) -> None:
        self.dismiss(True)


class AskKey(Dialog[str]):
    """The admin key."""

    def __init__(self, admin: str, problem: str) -> None:
        super().__init__()
        self._admin = admin
        self._problem = problem

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield titled("Admin key")
            yield Static(Text(self._problem), classes="about")
            yield Input(password=True, placeholder="the key; it is kept until this command ends", id="key", compact=True)
            yield Static(Text("Enter goes on, Escape leaves it", style="dim"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if key := event.value.strip():
            self.dismiss(key)


class Facts(Dialog[None]):
    """Names and values. Empty values are left out."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q,enter", "leave", "Close", show=False)]

    def __init__(self, title: str, facts: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._facts = facts

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box wide"):
            yield titled(self._title)
            yield Static(listed(self._facts))
            yield Static(Text("Escape closes", style="dim"), classes="reason")


def listed(facts: Sequence[tuple[str, str]]) -> Table:
    """One a line, with the values aligned."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=30)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value.strip("– "):
            table.add_row(Text(name, overflow="ellipsis", no_wrap=True), Text(value))
    return table


class Secret(Dialog[None]):
    """A new key, which is shown once."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "copy", "Copy", show=False), Binding("enter", "leave", show=False)]

    def __init__(self, title: str, about: str, secret: str) -> None:
        super().__init__()
        self._title = title
        self._about = about
        self._secret = secret

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield titled(self._title)
            yield Static(Text(self._about), classes="about")
            yield Static(Text(self._secret, style="bold"), id="secret")
            yield Static(Text("c copies it, if this terminal can (OSC 52); Enter or Escape: I have it", style="dim"))

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._secret)
        self.app.notify("Sent to the terminal's clipboard", timeout=3)
