"""An engine for real coding agents, which asks for many calls of the shell, and notes what it gets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from aiohttp import web

from tests.clients.agent_engine import WRITERS, Script
from tests.clients.watching import MAX_BODY, Watched, served

_BYTES_PER_TOKEN: Final = 40  # reported, so that no agent compacts


@contextlib.asynccontextmanager
async def agent_engine(asks: Script, watched: Watched) -> AsyncIterator[str]:
    """Asks the agent for its calls, and notes what it gets. Yields the base URL."""

    async def answered(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body: dict[str, Any] = json.loads(raw)
        whole, events = WRITERS[request.path](body, len(raw) // _BYTES_PER_TOKEN, 0, asks)
        watched.note(request.path, raw, b"".join(events))
        if not body.get("stream"):
            return web.json_response(whole)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for event in events:
            await reply.write(event)
        await reply.write_eof()
        return reply

    async def counted(request: web.Request) -> web.Response:
        return web.json_response({"input_tokens": len(await request.read()) // _BYTES_PER_TOKEN})

    async def models(_request: web.Request) -> web.Response:
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "bench"}
        return web.json_response({"object": "list", "data": [model]})

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/messages/count_tokens", counted)
    for path in WRITERS:
        app.router.add_post(path, answered)
    async with served(app) as url:
        yield url
