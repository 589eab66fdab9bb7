"""A streamed response.

The headers are sent with the first token, so a failure before that is a plain error with its own status; a later failure is
an event in the stream. A client that takes no bytes for too long is disconnected, and its request freed.
"""

import asyncio
import logging
from contextlib import aclosing

from aiohttp import web

from replica.api.generation import Encoder
from replica.api.stats import Stats
from replica.api.validation import ApiError
from replica.engine import EngineError
from replica.output.generation import Choices

log = logging.getLogger(__name__)


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
            async with asyncio.timeout(self._timeout_s):
                if not self.opened:
                    await self.response.prepare(self._http)
                if data:
                    await self.response.write(data)
                if last:
                    await self.response.write_eof()
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {self._timeout_s:g} s") from None
        finally:
            self._waited_s += _now() - began

    def close(self) -> None:
        if self.opened:
            self._stats.phase("send", self._waited_s, _now())


async def stream(choices: Choices, encoder: Encoder, client: ClientStream) -> web.StreamResponse:
    """Write the whole response. Errors are raised as long as nothing has been written."""
    out = b""
    left = choices.count
    try:
        async with aclosing(choices.deltas()) as deltas:
            async for index, delta in deltas:
                out += encoder.delta(index, delta, choices)
                left -= delta.finish is not None
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
    """The error as the client sees it. An unexpected one is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(500, f"The engine could not finish this request: {error}.")
    log.error("this request failed", exc_info=error)
    return ApiError(500, "This replica failed on this request; see its log.", code="internal_error")


def _now() -> float:
    return asyncio.get_running_loop().time()
