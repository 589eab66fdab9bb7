"""What stalls outside of the gateway does not stall it: a name server that is silent, a log that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp
import pytest

from tests.gateway.conftest import BODY
from tests.support.fakes import FakeReplica, http, writes
from tests.support.tools import tool

START_S = 60.0


@dataclass(slots=True)
class Gateway:
    """A gateway's process. Its log is read as far as `line` is called, and no further."""

    process: asyncio.subprocess.Process
    log: IO[bytes]
    session: aiohttp.ClientSession
    url: str = ""

    async def line(self) -> dict[str, object]:
        """The next one. Raises ValueError if it is torn."""
        made = json.loads(await asyncio.wait_for(asyncio.to_thread(self.log.readline), START_S))
        assert isinstance(made, dict)
        return made

    async def message(self, wanted: str) -> dict[str, object]:
        """The next line with this message."""
        while (line := await self.line())["message"] != wanted:
            pass
        return line

    async def ask(self) -> int:
        """A request's status."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=BODY) as answer:
            await answer.read()
            return answer.status

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as answer:
            return answer.status, await answer.text()

    async def end(self) -> float:
        """The seconds that it takes to end after SIGTERM."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self.process.wait(), START_S) == 0
        return time.monotonic() - begun


@contextlib.asynccontextmanager
async def started(arguments: Sequence[str], preload: Path | None = None) -> AsyncIterator[Gateway]:
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--port", "0", *arguments),
        stderr=writing,
        stdin=asyncio.subprocess.DEVNULL,
        env={**os.environ, **({"LD_PRELOAD": str(preload)} if preload else {})},
    )
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=4096) as log:
            try:
                async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(START_S)) as session:
                    gateway = Gateway(process, log, session)
                    gateway.url = str((await gateway.message("listening"))["url"])
                    yield gateway
            finally:  # before the log is closed, which waits for a thread that reads it
                if process.returncode is None:
                    process.kill()
    finally:
        await process.wait()


@pytest.fixture
def slow_names(tmp_path: Path) -> Path:
    """To be preloaded."""
    source, made = Path(__file__).with_name("slow_names.c"), tmp_path / "slow_names.so"
    subprocess.run([tool("gcc"), "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


async def test_silent_name_servers_delay_neither_the_start_nor_requests_nor_the_end(slow_names: Path, tmp_path: Path) -> None:
    """Ten names that hang, where libuv's pool has four threads; each request needs a new connection."""
    async with FakeReplica([writes(http(200, b"{}", "application/json", "Connection: close"))]) as replica:
        urls = [f"http://live.test:{replica.port}", *(f"http://hang-{number}.test:8000" for number in range(10))]
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"pools": [{"replicas": urls}], "health": {"timeout_s": 3}}))
        begun = time.monotonic()
        async with started(["--config", str(config)], slow_names) as gateway:
            assert time.monotonic() - begun < 30, "a look-up takes a minute"
            assert await gateway.ask() == 200
            assert (await gateway.get("/ready"))[0] == 200
            line = await gateway.message("replica down")
            assert str(line["error"]).startswith("name does not resolve: hang-")
            for _ in range(10):
                assert await gateway.ask() == 200
            assert replica.connections >= 10
            assert await gateway.end() < 20


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_log_that_nobody_reads_stops_nothing_and_is_whole_when_somebody_does(workers: int) -> None:
    """The pipe has room for 64 kB, the request log here writes some 400 kB."""
    async with FakeReplica() as replica, started(["--replica", replica.url, "--workers", str(workers)]) as gateway:
        for _ in range(800):
            assert await gateway.ask() == 200
        assert (await gateway.get("/health"))[0] == 200
        assert "warmroute_log_lines_dropped_total 0.0" in (await gateway.get("/metrics"))[1]
        seen = 0
        while seen < 800:
            seen += (await gateway.line())["message"] == "request"
        assert await gateway.ask() == 200
        await gateway.message("request")


async def test_a_log_that_nobody_reads_does_not_keep_it_from_ending() -> None:
    async with FakeReplica() as replica, started(["--replica", replica.url]) as gateway:
        for _ in range(800):
            assert await gateway.ask() == 200
        assert await gateway.end() < 20
