"""The prefix index as a tree: a node is a piece of prompts that some replica holds, its children are what came behind it. They
are asked for when it is opened.

Texts of prompts are nowhere in it: a node is named by the beginning of the key of its first block. Ages are as of the time when
a node was loaded. A node has the ROOM most recently used children at most, and says how many others there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static
from textual.widgets import Tree as TreeWidget
from textual.widgets.tree import TreeNode

from gateway.commands.top.access import Access
from gateway.commands.top.answers import Node
from gateway.commands.top.screens.dialogs import listed
from gateway.commands.top.screens.pane import Pane
from gateway.commands.top.state import Live
from gateway.commands.top.values import age, amount, count, digest, inside, percent, share, short, size

ROOM: Final = 48  # children that are asked for
MOST_LOADED: Final = 4000  # nodes; then the tree begins anew
STALE_S: Final = 10.0  # after which the heads are asked for again when the screen is opened
Place = TreeNode[Node | None]


def label(node: Node) -> Text:
    """One line: what it is, how long, who holds it, how old."""
    holders = [holder.replica for holder in node.holders]
    further = len(holders) - 2 + round(node.further_holders)
    names = ", ".join(holders[:2]) + (f" +{further}" if further > 0 else "") or "nobody"
    made = Text(digest(node.way) or "all", style="bold")
    made.append(f"  {short(node.tokens)} tokens", style="cyan" if node.holders else "dim")
    made.append(f"  {names}").append(f"  {age(node.idle_s)}", style="dim")
    if node.children:
        made.append(f"  {count(node.children)} below", style="dim")
    return made


def details(node: Node) -> list[tuple[str, str]]:
    first = [
        ("Node", node.way.replace(".", " › ")[-60:]),
        ("Piece", f"{count(node.tokens)} tokens in {count(node.blocks)} blocks, behind {count(node.depth_tokens)} tokens"),
        ("Last use", _ago(node.idle_s) if node.idle_s is not None else "nobody holds it any more"),
    ]
    held = [
        (holder.replica, f"{_part(holder.blocks, node.blocks)}{_pending(holder.pending)}, used {_ago(holder.idle_s)}")
        for holder in node.holders
    ]
    further = [("", f"and {count(node.further_holders)} further holders")] if node.further_holders else []
    return [*first, *held, *further]


def _ago(seconds: float | None) -> str:
    said = age(seconds)
    return said if said == "now" else f"{said} ago"


def _part(blocks: float, whole: float) -> str:
    part = share(blocks, whole)
    return "all of it" if part is not None and part >= 1 else f"{percent(part)} of it"


def _pending(pending: float) -> str:
    return f", {count(pending)} blocks of requests in flight" if pending else ""


class Index(TreeWidget[Node | None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]


class Tree(Pane):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "reload", "Reload"),
    ]

    loaded_at: float | None = None
    loaded = 0

    def __init__(self, access: Access, live: Live, **options: Any) -> None:
        super().__init__(access, live, **options)
        self.index = Index(Text("prefix index"), id="index")
        self.about = Static(id="node")

    def compose(self) -> ComposeResult:
        yield self.index
        yield VerticalScroll(self.about, id="node-box")
        yield self.note

    def show(self) -> None:
        index = self.live.index
        text = f"{size(amount(index.get('bytes')))} of {size(amount(index.get('most_bytes')))}"
        text += f"  ·  {count(amount(index.get('blocks')))} blocks held, over all replicas"
        if evicted := amount(index.get("evicted")):
            text += f"  ·  {count(evicted)} evicted"
        self.note.update(text)

    def opened(self) -> None:
        now = time.monotonic()
        if self.loaded_at is None or (now - self.loaded_at > STALE_S and self.loaded < ROOM):
            self.action_reload()

    def action_reload(self) -> None:
        """From the heads on; what was open is closed."""
        self.loaded_at = time.monotonic()
        self.loaded = 0
        self.load(self.index.root, "")

    def on_tree_node_expanded(self, event: TreeWidget.NodeExpanded[Node | None]) -> None:
        node = event.node.data
        if node is None or event.node.children or not node.children:
            return
        if self.loaded >= MOST_LOADED:
            self.say("Very many nodes are open: the tree begins anew")
            self.action_reload()
            return
        self.load(event.node, node.way)

    def on_tree_node_highlighted(self, event: TreeWidget.NodeHighlighted[Node | None]) -> None:
        node = event.node.data
        self.about.update(listed(details(node)) if node and node.way else Text(""))

    @work
    async def load(self, place: Place, way: str) -> None:
        """The node there, as it is now, and its children."""
        answer = await self.ask("GET", f"/warmroute/trie?way={way}&depth=1&children={ROOM}")
        if answer is None:
            return
        node = Node.of(inside(answer.get("node")))
        if node.way != way:
            self.say("That piece of the index is no longer there")
            place.remove_children()
            return
        place.data = node
        if way:
            place.set_label(label(node))
        self._add(place, node, node.shown)
        place.expand()

    def _add(self, place: Place, node: Node, children: Sequence[Node]) -> None:
        place.remove_children()
        for child in children:
            place.add(label(child), child, allow_expand=child.children > 0)
        self.loaded += len(children)
        if left := round(node.children) - len(children):
            place.add_leaf(Text(f"{count(left)} more, used longer ago", style="dim italic"), None)
        if not children and not node.way:
            place.add_leaf(Text("nothing is held: send requests, and reload with r", style="dim italic"), None)
