"""What stands behind the gateway: our simulated replica, whole or with chat alone, and engines that answer from a recording."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware

from replica.api.server import ServerConfig, create_app
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.support.fakes import STREAM_HEAD, Behaviour, FakeReplica, FakeRequest, chunk, http, models, writes

CHAT: Final = "/v1/chat/completions"
MODEL: Final = "m"
UNKNOWN: Final = writes(http(404, b'{"detail":"Not Found"}'))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def chat_alone(request: web.Request, handler: Handler) -> web.StreamResponse:
    """As an engine that has never heard of the other two APIs."""
    if request.path.startswith(("/v1/messages", "/v1/responses")):
        return web.json_response({"detail": "Not Found"}, status=404)
    return await handler(request)


class Seen(NamedTuple):
    """A request that came to a replica. headers: with lower-case names."""

    path: str
    headers: dict[str, str]
    body: Any


def noting(seen: list[Seen]) -> Middleware:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "POST":
            headers = {name.lower(): value for name, value in request.headers.items()}
            body = await request.read()
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                request.content.unread_data(body)  # the replica reads the stream itself
            seen.append(Seen(request.path, headers, json.loads(body)))
        return await handler(request)

    return note


@contextlib.asynccontextmanager
async def simulated(*, chat_only: bool = False, kv_tokens: int = 16_000, seen: list[Seen] | None = None) -> AsyncIterator[str]:
    """`warmroute replica --engine sim` on a socket of this process; its URL. seen: gets every POST."""
    config = SimConfig(kv_tokens=kv_tokens, prefill_rate=1e6, decode_rate=2000.0, max_batch=64)
    app = create_app(SimEngine(config), MODEL, ServerConfig())
    if chat_only:
        app.middlewares.append(chat_alone)
    if seen is not None:
        app.middlewares.append(noting(seen))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


def engine(answers: Mapping[str, bytes | Behaviour], model: str = MODEL) -> FakeReplica:
    """answers: by the end of their path (chat, messages, responses, count_tokens), followed by _stream for those that are
    streamed. A path without any is unknown.
    """

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        name = "chat" if path == CHAT else path.rpartition("/")[2]
        if request.json.get("stream"):
            name += "_stream"
        answer = answers.get(name, UNKNOWN)
        if not isinstance(answer, bytes):
            return await answer(request, writer)
        if name.endswith("_stream"):
            pieces = [part + b"\n\n" for part in answer.split(b"\n\n")[:-1]]
            writer.write(STREAM_HEAD + b"".join(map(chunk, pieces)) + b"0\r\n\r\n")
        else:
            writer.write(http(200, answer))
        return None

    return FakeReplica(script=[behave], listing=models(model))


def recorded(folder: Path, name: str) -> bytes:
    """A recorded answer: a stream as it is, of any other the answer as its engine has written it."""
    raw = (folder / name).read_bytes()
    if name.endswith(".sse"):
        return raw
    record: dict[str, Any] = json.loads(raw)
    return json.dumps(record.get("response", record.get("answer")), ensure_ascii=False, separators=(",", ":")).encode()
