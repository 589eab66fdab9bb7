"""A proxy that notes what a client sends, by the names of its conversations, and what it gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
from aiohttp import web

from gateway.features.prompt_log.naming.chain import head_name
from gateway.features.prompt_log.naming.forms import names_in

FORMS: Final = {"/v1/chat/completions": "chat", "/v1/messages": "messages", "/v1/responses": "responses"}
_HOP: Final = frozenset(["host", "content-length", "transfer-encoding", "connection", "keep-alive"])
_ADDED: Final = frozenset(["usage", "store", "previous_response_id"])  # counts; that a response is kept
MAX_BODY: Final = 64 << 20


class Watched:
    """conversations: names of the requests' logs, as a client sent them, or as an engine got them. answers: the events of
    each, as the engine wrote them, or as the client got them, without what gateways add (_ADDED).
    """

    def __init__(self) -> None:
        self.conversations = list[str]()
        self.answers = list[list[Any]]()

    def note(self, path: str, body: bytes, answer: bytes) -> None:
        self.conversations.append(name_of(path, body))
        self.answers.append(events_of(answer))


def events_of(answer: bytes) -> list[Any]:
    """The data of a stream's events, without what gateways add; of a plain answer, the same of it alone."""
    if answer.startswith(b"{"):
        return [_bare(json.loads(answer))]
    found = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    return [_bare(json.loads(data)) if data.startswith(b"{") else data for data in found]


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items() if name not in _ADDED}
    return [_bare(each) for each in value] if isinstance(value, list) else value


def name_of(path: str, body: bytes) -> str:
    """Of the conversation in a request: its frame, and its head."""
    names = names_in(body, FORMS[path])
    return f"{names.frame} {head_name(names.chain)}"


@contextlib.asynccontextmanager
async def watching(upstream: str, watched: Watched) -> AsyncIterator[str]:
    """Passes all requests on, and notes those for answers. Yields the base URL."""
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def passed_on(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
            async with session.request(
                request.method, upstream + request.path_qs, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                reply = web.StreamResponse(status=answer.status, headers=kept)
                await reply.prepare(request)
                got = b""
                async for piece in answer.content.iter_any():
                    got += piece
                    await reply.write(piece)
                if request.path in FORMS and answer.status == 200:
                    watched.note(request.path, body, got)
                with contextlib.suppress(ConnectionError):  # Codex leaves at its last event
                    await reply.write_eof()
                return reply

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{any:.*}", passed_on)
        async with served(app) as url:
            yield url


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """On any free port. Yields the base URL."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await asyncio.shield(runner.cleanup())
