"""The replicas of one process: each with its own port, engine, cache and metrics, on one event loop.

Theory of operation. A `ReplicaSpec` is a replica before it serves: its socket is bound but does not listen yet, so
connections are refused until its engine is ready. `serve` gives each of them a task; a task ends when the process is to stop,
or when its replica dies. A replica that dies is cut off as by a crash: open connections are closed in mid-answer, new ones
refused. In either case its engine is closed, then its other resources. If one replica cannot start, all of them end.

The start of an engine may take minutes in threads, which cannot be interrupted, and for which asyncio and the interpreter
wait at their end. So a process that is stopped before its replicas are ready cancels their starts, closes their resources and
ends without waiting for its threads. A process that is interrupted (Ctrl-C) while it stops ends at once, in the same way;
another SIGTERM changes nothing.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from replica.api.server import ServerConfig, create_app
from replica.engine import Engine, SetupError

Sleep = Callable[[float], Coroutine[Any, Any, object]]
BACKLOG = 4096  # connections that the kernel queues; a connection beyond that is not refused but hangs for seconds
SWITCH_S = 0.001  # how long a thread keeps the interpreter's lock while others wait for it
MAX_FILES = 1 << 16
IDLE_S = 75.0  # until a connection without a request is closed, after its first request
KERNELS = 128  # cached kernels; the steps of a replica use fewer at a time
COLLECT_AFTER = (10_000, 10, 10)  # thresholds of the garbage collector's generations
SHUTDOWN_S = 2.0  # time for open streams after SIGTERM; a gateway drains a replica before it is stopped
UNDO_S = 1.0  # time to undo a cancelled start
INTERRUPTED = 130  # exit status of a process that was stopped before it served, or interrupted while it stopped


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica before it serves. It dies `lifetime_s` after it is ready (None: never); `others`: the
    engines of further data-parallel ranks. `resources` are closed after its engine.
    """

    engine: Engine
    model: str
    listener: socket.socket
    config: ServerConfig = field(default_factory=ServerConfig)
    lifetime_s: float | None = None
    others: Items[Engine] = ()
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


def bound_kernels() -> None:
    """Bound the caches of oneDNN's kernels; call before torch computes. oneDNN makes a kernel for each shape of a product, and
    texts of all lengths have thousands of shapes. Two caches keep 1,024 kernels each (oneDNN's and torch's): hundreds of
    megabytes.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))


def raise_file_limit() -> None:
    """Raise the limit of open files: each connection takes a file descriptor, and the usual soft limit of 1,024 is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def favour_event_loop() -> None:
    """Shorten the pauses of the event loop; call when an engine is ready. The garbage collector, which stops all threads, no
    longer traverses the objects of the engines (a million objects, with torch: a quarter of a second), and traverses a
    request's body less often. The event loop, which releases the interpreter's lock with each system call, gets it back sooner:
    before, each of four threads that prepare prompts kept it for 5 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_S)


async def serve(
    specs: Items[ReplicaSpec],
    log: Callable[[str], None],
    sleep: Sleep = asyncio.sleep,
    end: Callable[[int], object] = os._exit,
    started: Callable[[], object] = favour_event_loop,
) -> bool:
    """Serve until SIGINT or SIGTERM; returns False if all replicas have died before. `log` gets a line when a replica is ready,
    or dies. `end` ends the process at once, with a status. `started` is called for each engine, before its replica serves.
    """
    stop = asyncio.Event()

    def interrupted() -> None:
        if stop.is_set():
            end(INTERRUPTED)
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    served = await asyncio.gather(*(_serve_one(spec, stop, log, sleep, started) for spec in specs))
    if not all(served):
        end(INTERRUPTED)
    return stop.is_set()


async def _serve_one(
    spec: ReplicaSpec, stop: asyncio.Event, log: Callable[[str], None], sleep: Sleep, started: Callable[[], object]
) -> bool:
    """Serve one replica; returns False if it was stopped before it was ready."""
    # No access log: the gateway has one, and a line per request costs more than the simulated engine's work.
    app = create_app(spec.engine, spec.model, spec.config, spec.others)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
        keepalive_timeout=IDLE_S,
        auto_decompress=False,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(spec.resources.close)
        stack.push_async_callback(runner.cleanup)
        if not await _done_before(stop, runner.setup()):
            return False
        started()
        site = web.SockSite(runner, spec.listener, backlog=BACKLOG)
        await site.start()
        name = f"replica {spec.model} ({spec.engine.info.kind})"
        url = _url(spec.listener)
        log(f"{name} ready on {url}")
        if spec.lifetime_s is None:
            await stop.wait()
        elif await _done_before(stop, sleep(spec.lifetime_s)):
            await site.stop()
            _abort_connections(runner)
            log(f"{name} died on {url} (--fault-death)")
    return True


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Wait for the work, or for the stop of the process; returns False if the stop comes first: the work is cancelled then, and
    waited for at most UNDO_S. Raises the errors of the work.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        stopped.cancel()
        working.cancel()
        await asyncio.wait((working,), timeout=UNDO_S)


def _abort_connections(runner: web.AppRunner) -> None:
    """Close every connection now; data that is not sent yet is dropped."""
    for connection in runner.server.connections if runner.server else ():
        if connection.transport is not None:
            connection.transport.abort()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
