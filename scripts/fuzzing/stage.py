"""Shared by the fuzzers of a whole gateway: recipes as inputs, a client, a watch on the log, a gateway in a thread.

A fuzzer of a gateway is a module with

    CLIENTS              inputs that are sent at once
    make(known, chance)  one input, made of a known one (b"": of nothing)
    watched()            an async context manager of a Stage: `blame` sends inputs and checks what became of them
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from random import Random
from typing import Any, Protocol

from scripts.fuzzing.answers import Outcome, read
from tests.gateway.conftest import Running, running

Recipe = Mapping[str, Any]

ANSWER_S = 120.0  # an answer that takes longer than this, on the slowest machine, does not come
_ERROR_FIELDS = {"message", "type", "param", "code"}
_MAX_ERROR = 16 << 10  # bytes of an error: a dozen models' names are in it


class Stage(Protocol):
    """A running gateway with everything around it that is watched."""

    async def blame(self, inputs: list[bytes], chance: Random) -> list[str]:
        """Send these; returns the kind of outcome of each. Raises AssertionError: a bug."""

    def notes(self) -> list[str]:
        """The measurements of the run."""


async def blame(batch: Callable[[list[bytes], Random], Awaitable[list[str]]], inputs: list[bytes], chance: Random) -> list[str]:
    """`batch` of the inputs; what fails is then tried alone, so that the message is about one input only."""
    try:
        return await batch(inputs, chance)
    except AssertionError as error:
        for data in inputs:
            await batch([data], chance)
        raise error


# -- recipes


def write_recipe(recipe: Recipe) -> bytes:
    return json.dumps(recipe, sort_keys=True).encode()


def read_recipe(data: bytes) -> Recipe:
    found: Recipe = json.loads(data)
    return found


def vary(known: bytes, invent: Callable[[Random], Recipe], chance: Random) -> bytes:
    """A new recipe, or a known one with some of its entries from a new one."""
    fresh = invent(chance)
    if known:
        chosen = chance.sample(sorted(fresh), chance.choice([1, 1, 2]))
        fresh = {**fresh, **read_recipe(known), **{name: fresh[name] for name in chosen}}
    return write_recipe(fresh)


# -- clients


async def ask(url: str, data: bytes) -> Outcome:
    """Send bytes on a connection of their own; the first answer, which has to be a whole one."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        received = b""
        async with asyncio.timeout(ANSWER_S):
            while True:
                more = await reader.read(1 << 16)
                received += more
                found = read([received])
                if isinstance(found, Outcome) and (found.early or not more):
                    return found
                assert more, ("the connection ended within the answer", data[:2000], received[:2000])
    finally:
        writer.transport.abort()


def error_code(answer: Outcome) -> str:
    """The code of an error, which has to be in the API's shape, and short."""
    assert len(answer.body) <= _MAX_ERROR, (len(answer.body), answer.body[:2000])
    body = json.loads(answer.body)
    assert set(body) == {"error"}, answer
    error = body["error"]
    assert set(error) == _ERROR_FIELDS, answer
    assert isinstance(error["message"], str), answer
    assert error["type"] == ("invalid_request_error" if answer.status < 500 else "server_error"), answer
    return str(error["code"])


# -- the gateway's log


class Errors(logging.Handler):
    """Log records of errors, or with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.seen.append(logging.Formatter().format(record))


@contextlib.contextmanager
def errors_logged() -> Iterator[Errors]:
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield errors
    finally:
        logging.getLogger().removeHandler(errors)


# -- a gateway in a thread of its own


class Pace:
    """The longest time in which an event loop did not turn, in seconds of its thread's CPU time: what others do on the machine,
    and in this process, does not count.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0

    async def run(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self._longest_s, last = max(self._longest_s, now - last), now

    def take(self) -> float:
        """The longest since it was taken last."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


@contextlib.asynccontextmanager
async def paced(*replicas: str, **config: Any) -> AsyncIterator[tuple[Running, Pace]]:
    """A gateway over these replicas, with an event loop of its own in a thread of its own: only sockets lead there."""
    loop, started, pace = asyncio.get_running_loop(), asyncio.get_running_loop().create_future(), Pace()

    async def serve() -> None:
        stop, inner = asyncio.Event(), asyncio.get_running_loop()
        async with running(*replicas, **config) as run:
            watch = asyncio.create_task(pace.run())
            loop.call_soon_threadsafe(started.set_result, (run, lambda: inner.call_soon_threadsafe(stop.set)))
            await stop.wait()
            watch.cancel()

    served: asyncio.Future[None] = loop.create_future()

    def thread() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001  (it is raised where this thread was started)
            loop.call_soon_threadsafe(served.set_exception, error)
        else:
            loop.call_soon_threadsafe(served.set_result, None)

    gc.collect()
    gc.freeze()  # else what this process holds beside the gateway counts as the gateway's time
    worker = threading.Thread(target=thread, name="gateway")
    worker.start()
    try:
        await asyncio.wait([started, served], return_when=asyncio.FIRST_COMPLETED)
        if served.done():
            served.result()
        run, stop = started.result()
        try:
            yield run, pace
        finally:
            stop()
            await served
    finally:
        await asyncio.to_thread(worker.join)
        gc.unfreeze()
