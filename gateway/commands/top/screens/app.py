"""The screens of `warmroute top`, and what is above and below them.

    Feed (a thread) ── take ──► Live ── revision ──► every REPAINT_S, if it has changed: the screen that is visible

However much comes, it is drawn four times a second at most. A feed that is lost comes back by itself; what was known stays on
the screen meanwhile, and the first line says so. With a 401 the key is asked for.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import ContentSwitcher, DataTable, Footer, Static, Tab, Tabs
from textual.widgets import Tree as TreeWidget

from gateway.commands.operate import OperatorError
from gateway.commands.top.access import Access
from gateway.commands.top.feed import LOST, Feed
from gateway.commands.top.screens.dialogs import AskKey, Facts
from gateway.commands.top.screens.keys import Keys
from gateway.commands.top.screens.money import Money
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.screens.replicas import Replicas
from gateway.commands.top.screens.requests import Requests
from gateway.commands.top.screens.tree import Tree
from gateway.commands.top.state import Live
from gateway.commands.top.summary import figures, head
from gateway.commands.top.values import age, text

REPAINT_S: Final = 0.25
ENDS: Final = (signal.SIGTERM, signal.SIGHUP)  # as if the user left, so that the terminal is as before
QUIET_S: Final = 5.0  # without news, after which the first line says so
SCREENS: Final = ("replicas", "requests", "tree", "money", "keys")
HELP: Final = (
    ("1 2 3 4 5", "replicas, requests, tree, money, keys"),
    ("arrows, Page", "move; Enter opens what is chosen"),
    ("replicas", "d drain, u undrain, s sort by the next column, S by the one before, R reverse; or click on a head"),
    ("requests", "space pauses, Enter explains with every candidate's cost, / finds"),
    ("tree", "Enter opens a piece of the index, r loads it anew"),
    ("money", "bars are from zero; the newest step is at the right"),
    ("keys", "n makes one, r rotates, x revokes, Enter shows what it may do"),
    ("k", "another admin key"),
    ("q, Ctrl-C", "quit"),
)


class Top(App[int]):
    """See the top of this file."""

    CSS_PATH = "top.tcss"
    ENABLE_COMMAND_PALETTE = False
    TITLE = "warmroute top"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(at), f"screen('{name}')", name.title(), show=False) for at, name in enumerate(SCREENS, 1)),
        Binding("k", "key", "Key", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, admin: str, env: Mapping[str, str]) -> None:
        super().__init__()
        self.access = Access(admin, env)
        self.live = Live()
        self.lost = ""
        self.feed = Feed(self.access, self.take)
        self.above = Static(id="status", markup=False)
        kinds = (Replicas, Requests, Tree, Money, Keys)
        self.panes = {name: kind(self.access, self.live, id=name) for name, kind in zip(SCREENS, kinds, strict=True)}
        self.pane: Pane = self.panes[SCREENS[0]]  # the one that is visible
        self._news_at = time.monotonic()
        self._drawn = -1
        self._asking = False

    def compose(self) -> ComposeResult:
        yield self.above
        yield Tabs(*(Tab(f"{at} {name}", id=f"tab-{name}") for at, name in enumerate(SCREENS, 1)))
        with ContentSwitcher(initial=SCREENS[0], id="screens"):
            yield from self.panes.values()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.feed.start()
        self.set_interval(REPAINT_S, self.repaint)
        self.query_one(Tabs).can_focus = False
        if threading.current_thread() is threading.main_thread():  # others have no signals
            for number in ENDS:
                asyncio.get_running_loop().add_signal_handler(number, self.exit, 0)
        self._focus()

    def on_unmount(self) -> None:
        self.feed.close()
        if threading.current_thread() is threading.main_thread():
            for number in ENDS:
                asyncio.get_running_loop().remove_signal_handler(number)

    # -- what comes

    def take(self, event: str, value: Any) -> None:
        """Of the feed, in the loop."""
        if event != LOST:
            self.lost = ""
            self._news_at = time.monotonic()
            self.live.take(event, value)
            return
        self.lost = text(str(value), 300)
        self.live.revision += 1
        if isinstance(value, OperatorError) and value.status == 401:
            self.action_key()

    def repaint(self) -> None:
        """If there is anything new."""
        self.above.update(self.status())
        if self._drawn != self.live.revision:
            self._drawn = self.live.revision
            self.pane.show()

    def status(self) -> Text:
        """Two lines; the second one has what fits."""
        silent = time.monotonic() - self._news_at
        if self.lost:
            state, tone = f"● not connected, trying again: {self.lost}", "bold red"
        elif self.live.problem:
            state, tone = f"● {self.live.problem}", "bold yellow"
        elif not self.live.version:
            state, tone = "● connecting", "yellow"
        elif silent > QUIET_S:
            state, tone = f"● no news for {age(silent)}", "bold yellow"
        else:
            state, tone = "● live", "green"
        width = max(20, self.size.width - 2)
        first = Text(no_wrap=True, overflow="ellipsis").append(state, style=tone)
        if self.live.version and not self.lost:
            first.append(f"  {text(self.access.admin)}  {head(self.live)}", style="dim")
        first.truncate(width, overflow="ellipsis")
        shown = ""
        for figure in figures(self.live) if self.live.version else ():
            longer = f"{shown}  {figure}" if shown else figure
            if len(longer) > width:
                break
            shown = longer
        return Text("\n").join([first, Text(shown, style="bold")])

    # -- what an operator does

    def action_screen(self, name: str) -> None:
        self.query_one(Tabs).active = f"tab-{name}"

    def on_tabs_tab_activated(self, event: Tabs.TabActivated) -> None:
        name = (event.tab.id or "").removeprefix("tab-")
        if name in SCREENS:
            self.pane = self.panes[name]
            self.query_one(ContentSwitcher).current = name
            self.call_after_refresh(self._opened)

    def _opened(self) -> None:
        self.pane.show()
        self.pane.opened()
        self._focus()

    def _focus(self) -> None:
        """What the arrows move in."""
        for widget in self.pane.query("DataTable, Tree"):
            if isinstance(widget, DataTable | TreeWidget):
                widget.focus()
                return

    def action_help(self) -> None:
        self.push_screen(Facts("Keys of warmroute top", HELP))

    @work
    async def action_key(self) -> None:
        """Ask for the admin key, once at a time."""
        if self._asking:
            return
        self._asking = True
        problem = self.lost or f"Of the gateway at {text(self.access.admin)}."
        try:
            while key := await self.push_screen_wait(AskKey(self.access.admin, problem)):
                try:
                    self.access.use(key)
                    break
                except OperatorError as error:
                    problem = str(error)
        finally:
            self._asking = False
        if key:
            self.feed.resume()


def show(admin: str, env: Mapping[str, str]) -> int:
    """Until the user leaves. Returns the exit status."""
    app = Top(admin, env)
    app.run()
    return app.return_code or 0
