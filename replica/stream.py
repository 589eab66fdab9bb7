"""A streamed answer on its way to the client.

The headers go out with the first token, so whatever fails before that is a plain error with its own status; what fails
later is said in the stream. A client that takes no bytes for too long is left, and its request freed.
"""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace

from aiohttp import web

from replica import wire
from replica.calls import UsageWish
from replica.engine import EngineError
from replica.fields import ApiError
from replica.generation import Choices
from replica.stats import Stats

log = logging.getLogger(__name__)


class Outlet:
    """One client's connection: opened by the first `write`."""

    def __init__(self, http: web.Request, headers: dict[str, str], stats: Stats, timeout_s: float) -> None:
        self._http, self._stats, self._timeout_s = http, stats, timeout_s
        kind = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers | kind)
        self._waited_s = 0.0

    @property
    def opened(self) -> bool:
        return self.response.prepared

    async def write(self, data: bytes, last: bool = False) -> None:
        """Returns when the client has room for more. Raises ConnectionError when it has none for too long."""
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


async def stream(choices: Choices, answer: wire.Answer, outlet: Outlet, usage: UsageWish) -> web.StreamResponse:
    """Write all of an answer. Raises what goes wrong as long as nothing has been written."""
    out = b""
    begun: set[int] = set()
    left = choices.count
    try:
        async with aclosing(choices.pieces()) as pieces:
            async for index, piece in pieces:
                so_far = choices.usage_of(index) if usage == "each" else None
                first = index not in begun
                if first:
                    begun.add(index)
                    out += answer.head(index, so_far and replace(so_far, completion_tokens=0))
                if piece.text or piece.scores or piece.finish is not None or (piece.tokens and answer.prompt_ids):
                    out += answer.piece(index, piece, so_far, first)
                left -= piece.finish is not None
                if left and (out or not outlet.opened):
                    await outlet.write(out)
                    out = b""
        if usage != "none":
            out += answer.usage(choices.usage())
    except ConnectionError:
        raise
    except Exception as error:
        if not outlet.opened:
            raise
        choices.fail()
        out += wire.error_event(failed(error))
    await outlet.write(out + wire.DONE, last=True)
    return outlet.response


def failed(error: Exception) -> ApiError:
    """What the client is told of it. What nobody has foreseen is for the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(500, f"The engine could not finish this request: {error}.")
    log.error("this request failed", exc_info=error)
    return ApiError(500, "This replica failed on this request; its log says why.", code="internal_error")


def _now() -> float:
    return asyncio.get_running_loop().time()
