"""Request bodies: reading and parsing them within bounds, and the threads for long ones.

The bytes are dropped once the values are parsed. Until the prompts are prepared they count in the budget of all requests
(admission); then, until the request is over, the part that it may still need counts.
"""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Generic, TypeVar

from aiohttp import web

from replica.api.admission import BodyBudget, BodyShare
from replica.api.validation import ApiError, check_size

T = TypeVar("T")
LONG_BODY: Final = 16 * 1024  # bytes; tokenizing them takes about 10 ms
PREPARERS: Final = 4  # threads: three bodies with a long preparation do not delay a fourth
TRIM_AFTER_S: Final = 2.0  # after a request with a long body
KEPT: Final = 1 << 18  # bytes beside its prompt that a request may need to its end: formats, stop strings, biases


class Preparers:
    """Threads for long work: streams continue, and small requests overtake. Work is given to the threads only when one is free,
    so that cancelled work holds no memory.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PREPARERS, "prepare")
        self._free = asyncio.Semaphore(PREPARERS)

    async def run(self, slow: bool, work: Callable[[], T]) -> T:
        """The result of `work`: computed here, or in a thread if it may take long."""
        if not slow:
            return work()
        await self._free.acquire()
        # Not a variable: an error refers to this frame, which would refer to the error and the body.
        return await self._begun(work)

    def _begun(self, work: Callable[[], T]) -> asyncio.Future[T]:
        begun = self._threads.submit(work)
        begun.add_done_callback(partial(self._done, asyncio.get_running_loop()))  # also if the caller was cancelled
        return asyncio.wrap_future(begun)

    def start(self, work: Callable[[], object]) -> None:
        """Run work in a thread, when one is free; nothing waits for it."""
        self._threads.submit(work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free.release)


class RequestBody(Generic[T]):
    """The parsed value of a body, which can be taken once, so that only its taker holds it. long: the body is long."""

    __slots__ = ("_share", "_value", "long")

    def __init__(self, value: T, long: bool, share: BodyShare) -> None:
        self._value: T | None = value
        self.long, self._share = long, share

    def take(self) -> T:
        value, self._value = self._value, None
        assert value is not None, "taken twice"
        return value

    def dropped(self, kept: int) -> None:
        """The value was dropped; the request still needs this many bytes, and at most KEPT others."""
        self._share.keep(KEPT + kept)


class BodyReader:
    """Reads the bodies of all requests; a body that does not arrive within `timeout_s` is refused."""

    def __init__(self, preparers: Preparers, budget: BodyBudget, timeout_s: float) -> None:
        self._preparers, self._budget, self._timeout_s = preparers, budget, timeout_s
        self._trim: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._trim is not None:
            self._trim.cancel()

    @asynccontextmanager
    async def read(self, http: web.Request, parse: Callable[[bytes], T]) -> AsyncIterator[RequestBody[T]]:
        """The body parsed by `parse`. Leave the context when the request is over. Raises ApiError for a body that is
        compressed, incomplete or invalid, or for which there is no room.
        """
        share = self._budget.share()
        try:
            yield await self._parsed(http, share, parse)
        finally:
            if share.counts and self._trim is None:
                self._trim = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._give_back)
            share.close()

    async def _parsed(self, http: web.Request, share: BodyShare, parse: Callable[[bytes], T]) -> RequestBody[T]:
        if http.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(
                415, "Compressed bodies are not read here: send it without Content-Encoding.", code="unsupported_encoding"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                raw = await self._received(http, share)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {self._timeout_s:g} s.", code="request_timeout") from None
        long = len(raw) > LONG_BODY
        return RequestBody(await self._preparers.run(long, partial(_checked, raw, parse)), long, share)

    async def _received(self, http: web.Request, share: BodyShare) -> bytes:
        """The bytes of the body. `http.read` would keep them as long as the request."""
        most = http.client_max_size
        if (http.content_length or 0) > most:
            raise web.HTTPRequestEntityTooLarge(most)
        self._budget.check(http.content_length or 0)
        body = bytearray()
        while chunk := await http.content.readany():
            body += chunk
            if len(body) > most:
                raise web.HTTPRequestEntityTooLarge(most)
            share.grow(len(body))
        return bytes(body)

    def _give_back(self) -> None:
        self._trim = None
        self._preparers.start(give_back_memory)


def _checked(raw: bytes, parse: Callable[[bytes], T]) -> T:
    check_size(raw)
    return parse(raw)


def give_back_memory() -> None:
    """Returns free memory of large bodies, and of tokens of their texts, to the system, if the C library can do that (glibc).
    Other threads run meanwhile.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
