"""A simulated replica on a loopback socket."""

import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDictProxy

from replica.api.server import ServerConfig, create_app
from replica.sim.cost import SimConfig
from tests.replica.fakes import FakeClock, WatchedEngine


@dataclass(frozen=True, slots=True)
class Replica:
    """A running server: its address, its engine, and the clock that moves it (None: real time)."""

    url: str
    engine: WatchedEngine
    clock: FakeClock | None
    http: aiohttp.ClientSession

    async def post(self, path: str, body: object) -> tuple[int, dict[str, object], CIMultiDictProxy[str]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json(), response.headers

    async def metric(self, name: str) -> float:
        """One sample of /metrics, by its name and perhaps a label."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if line.startswith(f"vllm:{name}")]
        assert len(lines) == 1, lines
        return float(lines[0].rsplit(" ", 1)[1])


async def serve(
    engine: WatchedEngine, clock: FakeClock | None, config: ServerConfig | None = None, around: Sequence[Middleware] = ()
) -> AsyncIterator[Replica]:
    """`around`: what sees each request before the server, and its response after that."""
    app = create_app(engine, "sim", config or ServerConfig(max_body_bytes=100_000))
    app.middlewares[:0] = around
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    # So that a client which reads nothing is felt soon; accepted connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
    await web.SockSite(runner, listener).start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        yield Replica(f"http://127.0.0.1:{port}", engine, clock, http)
    await runner.cleanup()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    """Fast, in real time."""
    config = SimConfig(kv_tokens=8000, prefill_rate=1e6, decode_rate=2000.0, max_batch=64)
    async for running in serve(WatchedEngine(config), None):
        yield running


@pytest.fixture
async def frozen() -> AsyncIterator[Replica]:
    """Its time stands still until the test moves it."""
    clock = FakeClock()
    config = SimConfig(kv_tokens=8000, prefill_rate=1000.0, decode_rate=100.0, max_batch=64)
    async for running in serve(WatchedEngine(config, clock), clock):
        yield running
