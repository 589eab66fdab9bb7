"""Replicas that are processes of their own, so that they can be killed: `warmroute replica --engine sim` speaks all three APIs,
`python -m tests.clients.sdk.processes PORT RATE` chat alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from bench.measure.ports import free_port
from replica.api.server import create_app
from replica.sim.cost import SimConfig
from replica.sim.engine import SimEngine
from tests.clients.sdk.engines import MODEL, chat_alone
from tests.deploy.processes import answers
from tests.support.paths import ROOT

DECODE_RATE = 200.0  # slow enough that a stream of a thousand tokens is killed in its middle


class Process:
    """A replica."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    async def kill(self) -> None:
        """SIGKILL, if it still runs; returns when it has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def process(log: Path, *, chat_only: bool = False, prefill_rate: float = 1e6) -> AsyncIterator[Process]:
    """It is ready, and stopped at the end if it still runs."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    rates = "--decode-rate", str(DECODE_RATE), "--prefill-rate", str(prefill_rate)
    whole = "gateway", "replica", "--engine", "sim", "--served-model-name", MODEL, "--port", str(port), *rates
    command = ("tests.clients.sdk.processes", str(port), str(prefill_rate)) if chat_only else whole
    with log.open("wb") as output:
        started = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, cwd=ROOT, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(answers, url + "/health"):
                assert started.returncode is None, f"it has ended: see {log}"
                await asyncio.sleep(0.05)
        yield Process(started, url)
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


def main(port: int, prefill_rate: float) -> None:
    config = SimConfig(kv_tokens=100_000, prefill_rate=prefill_rate, decode_rate=DECODE_RATE)
    app = create_app(SimEngine(config), MODEL)
    app.middlewares.append(chat_alone)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
