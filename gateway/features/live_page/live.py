"""Operator endpoints for the live page, `warmroute status` and scripts, on every port with operator endpoints.

    GET /warmroute/live              the whole state, as JSON
    GET /warmroute/live/events       the same, then changes once a second, as server-sent events
    GET /warmroute/live/requests/KEY why the replica of a request was chosen
    GET /warmroute/trie              a part of the prefix index

docs/ui.md describes the fields.
"""

from __future__ import annotations

import asyncio
import re
import socket
from functools import partial
from typing import Any, Final

import orjson

from gateway.cluster.commands import LocalControl
from gateway.errors import GatewayError, bad_request
from gateway.features.live_page.broadcast import Broadcast
from gateway.request.client import ClientReply
from gateway.server.http.request import HttpRequest
from gateway.server.operator import Operator
from gateway.server.routing import Response, Route, get
from gateway.turns import turns_of
from router.index.picture import DrawnNode, Picture
from router.index.tree import MAX_EDGES

STALL_S: Final = 20.0  # time limit for writing one event, and for its acknowledgement
SEND_BUFFER: Final = 128 << 10  # bytes of the kernel's buffer
MAX_DEPTH: Final = 4
MAX_CHILDREN: Final = 64
MAX_NODES: Final = 400
_KEY: Final = re.compile(r"[0-9a-f]{16}")
_HEADERS: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_STREAM_LINES: Final = (
    b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    b"X-Accel-Buffering: no\r\n"  # makes nginx forward it without buffering
)


class LiveEndpoints:
    """The handlers; `routes` mounts them."""

    def __init__(self, operator: Operator, local: LocalControl, broadcast: Broadcast, stall_s: float = STALL_S) -> None:
        self._operator = operator
        self._router = local.router
        self._clock = local.clock
        self._broadcast = broadcast
        self._stall_s = stall_s

    def routes(self) -> list[Route]:
        return [
            get("/warmroute/live", self.snapshot),
            get("/warmroute/live/events", self.events, head=False),
            get("/warmroute/live/requests/{key}", self.explain),
            get("/warmroute/trie", self.trie),
        ]

    async def snapshot(self, request: HttpRequest) -> Response:
        """The whole state. The first question starts the watch."""
        self._operator.allow(request)
        return _json(await self._broadcast.snapshot())

    async def events(self, request: HttpRequest) -> ClientReply:
        """`hello` has the whole state, each `frame` the changes. Ends if the client is too slow, or the gateway shuts down."""
        self._operator.allow(request)
        watcher = await self._broadcast.watch()
        reply = request.reply(keep_alive=False, patience_s=self._stall_s)
        try:
            reply.begin(200, _STREAM_LINES, length=None)
            _limit_stall(request, self._stall_s)
            while event := await watcher.next():
                reply.write(event)
                await reply.flushed()
            reply.end()
        finally:
            self._broadcast.leave(watcher)
        return reply

    async def explain(self, request: HttpRequest) -> Response:
        """The cost of every candidate in the decision for a request."""
        self._operator.allow(request)
        key = request.parameters["key"]
        if found := await self._broadcast.explain(key):
            return _json(found)
        text = f"The request {key[:40]!r} is unknown: decisions are stored for the last few hundred requests only."
        raise GatewayError(404, "request_not_found", text, param="key")

    async def trie(self, request: HttpRequest) -> Response:
        """A node of the prefix index and its descendants. Query: `way` (keys, with dots), `depth`, `children`."""
        self._operator.allow(request)
        query = request.query
        depth, children = (
            _number(query.get("depth", "2"), "depth", MAX_DEPTH),
            _number(query.get("children", "12"), "children", MAX_CHILDREN),
        )
        trie, now = self._router.trie, self._clock()
        drawn = await _drawn(Picture(trie, now, depth, children, MAX_NODES), _way(query.get("way", "")))
        about = {"ttl_s": trie.ttl_s, "bytes": trie.size_bytes, "most_bytes": trie.max_bytes, "evicted": trie.evicted}
        return _json({"node": _node(drawn), **about})

    def __repr__(self) -> str:
        return f"<LiveEndpoints, {self._broadcast!r}>"


async def _drawn(picture: Picture, way: list[bytes]) -> DrawnNode:
    """Draws in turns of the event loop, which it shares with other long work."""
    turns, steps = turns_of(asyncio.get_running_loop()), picture.steps(way)
    drawn: DrawnNode | None = None
    while drawn is None:
        drawn = await turns.take(partial(next, steps))
    return drawn


def _way(text: str) -> list[bytes]:
    """Parses a path of keys. Raises GatewayError 400."""
    parts = text.split(".") if text else []
    if len(parts) > MAX_EDGES or not all(_KEY.fullmatch(part) for part in parts):
        raise bad_request(f"'way' must be keys of 16 hexadecimal digits separated by dots, {MAX_EDGES} at most.", "way")
    return [bytes.fromhex(part) for part in parts]


def _number(text: str, name: str, max_value: int) -> int:
    """Parses a number from 1 to max_value. Raises GatewayError 400."""
    if text.isascii() and text.isdecimal() and len(text) < 4 and 1 <= int(text) <= max_value:
        return int(text)
    raise bad_request(f"'{name}' must be a whole number from 1 to {max_value}.", name)


def _node(drawn: DrawnNode) -> dict[str, Any]:
    return {
        "way": ".".join([key.hex() for key in drawn.way]),
        "blocks": drawn.blocks,
        "tokens": drawn.tokens,
        "depth_tokens": drawn.depth_tokens,
        "holders": [holder._asdict() for holder in drawn.holders],
        "further_holders": drawn.further,
        "idle_s": drawn.idle_s,
        "children": drawn.children,
        "shown": [_node(child) for child in drawn.shown],
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), headers=_HEADERS)


def _limit_stall(request: HttpRequest, stall_s: float) -> None:
    """Limits the data that wait in the kernel for a client that does not read, and the time: after stall_s the connection is
    closed.
    """
    transport = request.connection.transport
    sock = transport.get_extra_info("socket") if transport else None
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
