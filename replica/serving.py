"""The replicas of one process: each with its own port, engine, cache and metrics, on one event loop.

Theory of operation. A `Station` is a replica before it serves: its socket is bound but does not listen yet, so clients are
refused until its engine is ready. `serve` gives each of them a task; a task ends when all are told to stop, or when its
replica dies. A replica that dies is cut off as by a crash: nobody who waits gets a word, connecting is refused. In
either case its engine is closed, then what else it had. The first that cannot start ends all of them.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from replica.engine import Engine, SetupError
from replica.server import ServerConfig, create_app

Sleep = Callable[[float], Coroutine[Any, Any, object]]
BACKLOG = 4096  # connections that the kernel holds for us; one too many is not refused but hangs for seconds
SHUTDOWN_S = 2.0  # how long open streams may go on after SIGTERM; a gateway drains a replica before it stops it


@dataclass(frozen=True, slots=True)
class Station:
    """One replica to be. It dies `lives_s` after it is ready (None: never); `resources` are closed after its engine."""

    engine: Engine
    model: str
    listener: socket.socket
    config: ServerConfig = field(default_factory=ServerConfig)
    lives_s: float | None = None
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet."""
    if port > 65_535:
        raise SetupError(f"there is no port {port}: choose a smaller --port or --count")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise SetupError(f"cannot listen on {host}:{port}: {reason}; choose another --port, or 0 for any") from error
    return bound


async def serve(stations: Items[Station], say: Callable[[str], None], sleep: Sleep = asyncio.sleep) -> bool:
    """Serve until SIGINT or SIGTERM; False if all have died before. `say` gets a line when one is ready, or dies."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await asyncio.gather(*(_live(station, stop, say, sleep) for station in stations))
    return stop.is_set()


async def _live(station: Station, stop: asyncio.Event, say: Callable[[str], None], sleep: Sleep) -> None:
    # Access logs off: a gateway stands in front, and a line per request costs more than the simulated engine's work.
    app = create_app(station.engine, station.model, station.config)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(station.resources.close)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        site = web.SockSite(runner, station.listener, backlog=BACKLOG)
        await site.start()
        name = f"replica {station.model} ({station.engine.info.kind})"
        url = _url(station.listener)
        say(f"{name} ready on {url}")
        if station.lives_s is None:
            await stop.wait()
        elif not await _outlives(stop, sleep(station.lives_s)):
            await site.stop()
            _cut(runner)
            say(f"{name} died on {url}, as --fault-death asked")


async def _outlives(stop: asyncio.Event, life: Coroutine[Any, Any, object]) -> bool:
    """Wait for either; whether it was told to stop before its life was over."""
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(life)]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    return stop.is_set()


def _cut(runner: web.AppRunner) -> None:
    """Drop every connection, with whatever was on its way."""
    for connection in runner.server.connections if runner.server else ():
        if connection.transport is not None:
            connection.transport.abort()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
