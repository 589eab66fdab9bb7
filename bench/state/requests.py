"""A kept request over HTTP, beside the same with `store: false`: CPU of the gateway's process.

python -m bench.state.requests PORT: the replica, which answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from aiohttp import web

from bench.measure.cpu import cpu_seconds
from bench.measure.ports import free_ports

_BOUND_S = 60.0
_CONNECTIONS = 16


async def measured(url: str, count: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """CPU microseconds of a request, and how many were not as they should be, by its kind. The least of the rounds."""
    ports = free_ports(2)
    with process("-m", "bench.state.requests", str(ports[0])), gateway(ports[0], ports[1], url) as started:
        return await _all(responses_of(ports[1]), started.pid, count, rounds)


@contextlib.contextmanager
def gateway(replica: int, port: int, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """replica, port: ports. url: of its store."""
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin_listen": "off",
        "pools": [{"replicas": [f"http://127.0.0.1:{replica}"]}],
        "state": {"url": url},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gateway.yaml"
        path.write_text(json.dumps(config))
        with process("-m", "gateway", "serve", "--config", str(path)) as started:
            yield started


def responses_of(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/responses"


async def _all(url: str, pid: int, count: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    best, wrong = dict[str, float](), dict[str, int]()
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector) as session:
        first = await first_answer(session, url)
        kinds = {
            "`store: false`": (False, ""),
            "kept": (True, ""),
            "kept, with `previous_response_id`": (True, str(first["id"])),
        }
        for _ in range(rounds):
            for name, (store, previous) in kinds.items():
                spent = cpu_seconds(pid)
                bad = await _many(session, url, count, store=store, previous=previous)
                each = (cpu_seconds(pid) - spent) / count * 1e6
                best[name] = min(each, best.get(name, each))
                wrong[name] = wrong.get(name, 0) + bad
    return best, wrong


async def _many(session: aiohttp.ClientSession, url: str, count: int, *, store: bool, previous: str) -> int:
    left, bad = itertools.count(), 0

    async def lane() -> None:
        nonlocal bad
        while next(left) < count:
            found = await ask(session, url, store, previous)
            bad += found.get("store") is not store

    await asyncio.gather(*(lane() for _ in range(_CONNECTIONS)))
    return bad


async def ask(session: aiohttp.ClientSession, url: str, store: bool, previous: str) -> dict[str, object]:
    body = {"model": "m", "input": "x" * 2000, "store": store, **({"previous_response_id": previous} if previous else {})}
    async with session.post(url, json=body) as answer:
        found: dict[str, object] = await answer.json()
        return found


async def first_answer(session: aiohttp.ClientSession, url: str) -> dict[str, object]:
    """The first good answer: the gateway comes up meanwhile."""
    until = time.monotonic() + _BOUND_S
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            if "id" in (found := await ask(session, url, True, "")):
                return found
        if time.monotonic() > until:
            raise TimeoutError("the gateway does not answer")
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def serve(port: int) -> None:
    numbers = itertools.count()

    async def answer(request: web.Request) -> web.Response:
        asked, number = await request.json(), next(numbers)
        content = [{"type": "output_text", "text": "y" * 500, "annotations": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": content}
        usage = {"input_tokens": 500, "output_tokens": 100, "total_tokens": 600}
        found = {"id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed", "model": "m"}
        return web.json_response({**found, "output": [message], "usage": usage, "store": asked.get("store", True)})

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/responses", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
