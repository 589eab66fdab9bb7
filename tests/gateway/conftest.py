"""A gateway in this process, on a real socket, in front of whatever replicas a test brings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from yarl import URL

from gateway.app import Gateway, compose
from gateway.config.schema import Config
from gateway.core import Surroundings
from gateway.features.table import FEATURES
from gateway.fleet.directory import FIRST_PROBES_S
from gateway.server.endpoints import ADMIN, SHUTDOWN_S, clients_runner, side_runner
from gateway.server.http.connections import ClientServer
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.resolver import Resolver
from tests.support.compiled import COMPILED
from tests.support.configs import load
from tests.support.fakes import FakeReplica

collect_ignore = ["test_extensions.py", "test_features.py"] if COMPILED else []  # toys are no part of what was compiled
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello " * 200}]}


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition holds that no event announces; fail loudly if it never does."""
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110  (what it waits for is in another process or deep in a library)
            await asyncio.sleep(0.002)


async def longest_pause(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds of this thread for which the event loop did not turn, at most, while that was awaited. Without collections."""
    longest, last, done = 0.0, time.thread_time(), False

    def turn() -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now
        if not done:
            loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    loop.call_soon(turn)
    gc.disable()
    try:
        await work()
    finally:
        done = True
        longest = max(longest, time.thread_time() - last)  # the work may end without another turn
        gc.enable()
    return longest


@dataclass
class Running:
    """url: of the clients' port; admin_url: of the operators' listener."""

    gateway: Gateway
    url: str
    admin_url: str
    session: aiohttp.ClientSession

    @functools.cached_property
    def client(self) -> openai.AsyncOpenAI:
        """Made when it is used, and without certificates: they take longer to load than a gateway to start."""
        http = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0, http_client=http)

    async def close(self) -> None:
        if client := vars(self).get("client"):
            await client.close()

    async def post(self, body: Any = BODY, path: str = "/v1/chat/completions", **options: Any) -> tuple[int, Any, Any]:
        """(status, headers, parsed answer)."""
        data = {"json": body} if isinstance(body, dict) else {"data": body}
        async with self.session.post(URL(self._base(path) + path, encoded=True), **data, **options) as answer:
            return answer.status, answer.headers, await answer.json(content_type=None)

    async def get(self, path: str, **options: Any) -> tuple[int, Any, bytes]:
        async with self.session.get(self._base(path) + path, **options) as answer:
            return answer.status, answer.headers, await answer.read()

    def _base(self, path: str) -> str:
        return self.admin_url if path.startswith("/warmroute/") else self.url

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by its exposition name and labels."""
        text = (await self.get("/metrics"))[2].decode()
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}


# `test_features.py` runs the core's tests where there are no features, and so no such section.
KEEPS_NOTHING: dict[str, Any] = {"state": {"url": "off"}} if "responses" in FEATURES else {}
FORGETS_AT_ONCE: dict[str, Any] = {"adopt_s": 0.001} if "adoption" in FEATURES else {}


def config_over(*replicas: FakeReplica | str | dict[str, Any], **raw: Any) -> Config:
    """On a free port, and it keeps nothing, unless `raw` says otherwise. Who leaves and does not come at once is forgotten."""
    listed = [replica.url if isinstance(replica, FakeReplica) else replica for replica in replicas]
    base: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "health": {"interval_s": 60},
        **KEEPS_NOTHING,
    }
    limits = {**FORGETS_AT_ONCE, **raw.pop("limits", {"drain_timeout_s": 1})}
    return load(None, {**base, "pools": [{"replicas": listed}], **raw, "limits": limits}, env={})


@contextlib.asynccontextmanager
async def running(
    *replicas: FakeReplica | str,
    resolver: Resolver | None = None,
    first_probes_s: float = FIRST_PROBES_S,
    late_s: float = 60.0,
    **config: Any,
) -> AsyncIterator[Running]:
    """A gateway over these replicas, patient with a store on a busy machine. At the end nothing may be left open: no lease, no
    broken invariant.
    """
    around = Surroundings(resolver=resolver, first_probes_s=first_probes_s, late_s=late_s)
    gateway = compose(config_over(*replicas, **config), LOGGED, around)
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        yield run


@contextlib.asynccontextmanager
async def serving_runner(gateway: Gateway, server: ClientServer) -> AsyncIterator[Running]:
    """On any free port, with what goes on in the background."""
    async with (
        gateway.background(),
        listening(server) as url,
        listening(side_runner(gateway.served, ADMIN)) as admin_url,
        # The default resolver opens a channel of c-ares, which takes as long as a tenth of the gateway's start.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=aiohttp.ThreadedResolver())) as session,
    ):
        run = Running(gateway, url, admin_url, session)
        try:
            yield run
        finally:
            await run.close()
        await eventually(lambda: gateway.router.ledger.open_leases == 0)
        gateway.router.check()


@contextlib.asynccontextmanager
async def listening(server: ClientServer, path: str = "") -> AsyncIterator[str]:
    """Its URL. path: of a Unix socket."""
    loop = asyncio.get_running_loop()
    listener = await (loop.create_unix_server(server, path) if path else loop.create_server(server, "127.0.0.1", 0))
    try:
        yield f"unix:{path}" if path else f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.shutdown(SHUTDOWN_S)


STREAM = io.BytesIO()
OUTPUT = LogOutput(STREAM.write)
LOGGED = RequestLog(OUTPUT, logging.INFO)


@pytest.fixture
def request_lines() -> Callable[[], list[dict[str, Any]]]:
    """The request log's lines since the test began, parsed."""
    OUTPUT.flush()
    begun = STREAM.tell()

    def lines() -> list[dict[str, Any]]:
        OUTPUT.flush()
        return [json.loads(line) for line in STREAM.getvalue()[begun:].splitlines()]

    return lines
