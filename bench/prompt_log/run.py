"""The programs of a run: a gateway with a store behind the slow link, and `warmroute sync` before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from bench.fleet.stage import ready
from bench.measure.cpu import cpu_seconds
from bench.measure.ports import free_port
from bench.prompt_log.link import SlowLink
from gateway.features.prompt_log.naming.chain import EMPTY, head_name


@dataclass(frozen=True, slots=True)
class Run:
    """calls: requests. up: bytes. busy_s: the link was in use upwards. faithful: all arrived as it was sent, as far as that is
    observed.
    """

    calls: int
    answers: list[str]
    faithful: bool
    up: int
    busy_s: float
    wall_s: float
    far_cpu_s: float
    near_cpu_s: float


class FarGateway(NamedTuple):
    """url: without the link."""

    url: str
    pid: int


class Meter:
    """Measures from its creation on. near: process id of the sidecar; None: without one."""

    def __init__(self, link: SlowLink, far: int, near: int | None) -> None:
        self._link = link
        self._pids = far, near
        self._begun = self._read()

    def run(self, calls: int, answers: list[str], *, faithful: bool = True) -> Run:
        return Run(calls, answers, faithful, *(now - then for now, then in zip(self._read(), self._begun, strict=True)))

    def _read(self) -> tuple[int, float, float, float, float]:
        far, near = self._pids
        return self._link.up, self._link.busy_s, time.monotonic(), cpu_seconds(far), cpu_seconds(near) if near else 0.0


@contextlib.asynccontextmanager
async def far_gateway(
    folder: Path, replica: str, bits_s: float, delay_s: float, **more: Any
) -> AsyncIterator[tuple[FarGateway, SlowLink]]:
    """A gateway with an empty store, and the link to it. more: its configuration."""
    port, config = free_port(), folder / "gateway.yaml"
    state = {"url": f"sqlite:///{folder}/state.db"}
    listen = {"listen": f"127.0.0.1:{port}", "admin_listen": "off", "pools": [{"replicas": [replica]}]}
    config.write_text(json.dumps({**listen, "state": state, "log_level": "error", **more}))
    url = f"http://127.0.0.1:{port}"
    async with (
        program("serve", "--config", str(config), url=url) as far,
        SlowLink("127.0.0.1", port, bits_s, delay_s).listening() as link,
    ):
        yield FarGateway(url, far.pid), link


@contextlib.asynccontextmanager
async def sidecar(upstream: str) -> AsyncIterator[tuple[str, int]]:
    """Yields its base URL and its process id."""
    address = f"127.0.0.1:{free_port()}"
    arguments = ("sync", "--upstream", upstream, "--listen", address, "--log-level", "error")
    async with program(*arguments, url=f"http://{address}") as near:
        yield f"http://{address}", near.pid


@contextlib.asynccontextmanager
async def program(*arguments: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "gateway", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await ready([url], "/health")
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        await process.wait()


async def warmed(url: str) -> None:
    """Has the gateway open its store, of another key."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession(headers={"Prompt-Log": "keep", "Authorization": "Bearer w"}) as session:
        async with session.get(f"{url}/v1/logs/{head_name(EMPTY)}") as answer:  # waits for the store
            await answer.read()
        for _ in range(3):
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
