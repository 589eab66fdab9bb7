"""The transport of responses to the client, whole or as a stream.

The headers of a stream are sent with the first token, so a failure before that is a plain error with its own status; a later
failure is an event in the stream. A client that takes no bytes of a stream for too long is disconnected, and so is a client
that does not take another body completely in time: other requests may be waiting for its share of the memory budget.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import aclosing
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from replica.api.admission import BodyBudget
from replica.api.generation import Encoder
from replica.api.stats import Stats
from replica.api.validation import ApiError
from replica.engine import EngineError
from replica.output.generation import Choices

PIECE = 1 << 17  # bytes of a whole body; aiohttp waits for the client after each piece of more than 64 KiB
RATE = 1 << 20  # bytes a second; the time for a body at this rate is added to its timeout
log = logging.getLogger(__name__)


def sending(timeout_s: float, budget: BodyBudget) -> Middleware:
    """A middleware, the outermost one, that sends the responses that are no streams. aiohttp would wait for a client that reads
    nothing as long as it is connected. Until they are sent, they count in the memory budget.
    """

    @web.middleware
    async def send(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ConnectionError:  # of a stream whose client has left
            return web.Response()  # which aiohttp cannot send
        if not isinstance(response, web.Response):
            return response
        size = len(response.body) if isinstance(response.body, bytes) else 0
        share = budget.answer(size, partial(_cut, request))
        try:
            return await _sent(request, response, timeout_s)
        except ConnectionError:
            return response  # which aiohttp cannot send either
        finally:
            share.close()

    return send


def _cut(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()


async def _sent(http: web.Request, response: web.Response, timeout_s: float) -> web.StreamResponse:
    body = response.body
    if not isinstance(body, bytes) or len(body) <= PIECE or http.method == "HEAD":
        await _in_time(http, timeout_s, _send(http, response))
        return response
    pieces = web.StreamResponse(status=response.status, headers=response.headers)
    pieces.content_length = len(body)
    await _in_time(http, timeout_s + len(body) / RATE, _send_pieces(http, pieces, body))
    return pieces


async def _send(http: web.Request, response: web.Response) -> None:
    await response.prepare(http)
    await response.write_eof()


async def _send_pieces(http: web.Request, response: web.StreamResponse, body: bytes) -> None:
    await response.prepare(http)
    view, last = memoryview(body), (len(body) - 1) // PIECE * PIECE
    for at in range(0, last, PIECE):
        await response.write(view[at : at + PIECE])
    await response.write_eof(body[last:])


async def _in_time(http: web.Request, timeout_s: float, writing: Awaitable[object]) -> None:
    """Wait for a write. Raises ConnectionError if the client does not take the bytes in time: it is disconnected."""
    try:
        async with asyncio.timeout(timeout_s):
            await writing
    except TimeoutError:
        _cut(http)
        raise ConnectionResetError(f"the client did not take it within {timeout_s:g} s") from None


class ClientStream:
    """The connection to one client; the first `write` sends the headers."""

    def __init__(self, http: web.Request, headers: dict[str, str], stats: Stats, timeout_s: float) -> None:
        self._http, self._stats, self._timeout_s = http, stats, timeout_s
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers | kind)
        self._waited_s = 0.0

    @property
    def opened(self) -> bool:
        return self.response.prepared

    async def write(self, data: bytes, last: bool = False) -> None:
        """Returns when there is room for more. Raises ConnectionError if the client takes nothing for too long."""
        began = _now()
        try:
            await _in_time(self._http, self._timeout_s + len(data) / RATE, self._write(data, last))
        finally:
            self._waited_s += _now() - began

    async def _write(self, data: bytes, last: bool) -> None:
        if not self.opened:
            await self.response.prepare(self._http)
        if data:
            await self.response.write(data)
        if last:
            await self.response.write_eof()

    def close(self) -> None:
        if self.opened:
            self._stats.phase("send", self._waited_s, _now())


async def stream(choices: Choices, encoder: Encoder, client: ClientStream) -> web.StreamResponse:
    """Write the whole response. Errors are raised as long as nothing has been written."""
    out = b""
    left = choices.count
    try:
        async with aclosing(choices.deltas()) as deltas:
            async for together in deltas:  # one write for all: each write releases the interpreter's lock
                out += b"".join(encoder.delta(index, delta, choices) for index, delta in together)
                left -= sum(delta.finish is not None for _, delta in together)
                if left and (out or not client.opened):
                    await client.write(out)
                    out = b""
        out += encoder.end(choices)
    except ConnectionError:
        raise
    except Exception as error:
        if not client.opened:
            raise
        choices.fail()
        out += encoder.failed(client_error(error))
    await client.write(out, last=True)
    return client.response


def client_error(error: Exception) -> ApiError:
    """The error as the client sees it. An unexpected error is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(500, f"The engine could not finish this request: {error}.")
    log.error("this request failed", exc_info=error)
    return ApiError(500, "This replica failed on this request; see its log.", code="internal_error")


def _now() -> float:
    return asyncio.get_running_loop().time()
