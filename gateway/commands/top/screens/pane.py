"""What the screens have in common: they are drawn from what is known, and ask the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.containers import Vertical
from textual.widgets import Static

from gateway.commands.operate import OperatorError
from gateway.commands.top.state import Live
from gateway.commands.top.values import Json, text

if TYPE_CHECKING:
    from gateway.commands.top.access import Access

MESSAGE_S = 6.0  # for which a message is shown


class Pane(Vertical):
    """One screen. `show` is called when something has changed and the screen is visible, and when it becomes visible."""

    def __init__(self, access: Access, live: Live, **options: Any) -> None:
        super().__init__(**options)
        self.access = access
        self.live = live
        self.note = Static(classes="note", markup=False)  # the last line

    def show(self) -> None:
        """Draw what is known."""

    def opened(self) -> None:
        """It has become visible: what it asks for itself is asked now."""

    async def ask(self, method: str, path: str, body: Any = None) -> Json | None:
        """None: the gateway has refused it, and the operator was told why."""
        try:
            return await self.access.call(method, path, body)
        except OperatorError as error:
            self.say(f"Not done: {error}", wrong=True)
            return None

    def say(self, message: str, *, wrong: bool = False) -> None:
        """Beside the screen, for a while."""
        self.app.notify(text(message, 400), severity="error" if wrong else "information", timeout=MESSAGE_S, markup=False)
