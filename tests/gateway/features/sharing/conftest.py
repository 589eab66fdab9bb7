"""Gateways in this process that share through a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import compose
from gateway.cluster.commands import SingleProcess
from gateway.core import Surroundings
from gateway.features.sharing.outbox import MAX_UNSENT_BYTES
from gateway.features.sharing.single_process import single_process
from gateway.features.snapshots.keeper import SnapshotFile
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, Running, config_over, serving_runner
from tests.support.fakes import FakeReplica
from tests.support.redis import RedisServer, serving


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    with serving(RedisServer(tmp_path)) as server:
        yield server


@contextlib.asynccontextmanager
async def sharing(
    *replicas: FakeReplica, file: Path | None = None, unsent_bytes: int = MAX_UNSENT_BYTES, **config: Any
) -> AsyncIterator[Running]:
    """A gateway that is one process. file: of its snapshots."""
    made: list[SingleProcess] = []

    def control_plane(local: Any) -> SingleProcess:
        made.append(single_process(local, snapshot=SnapshotFile(file, 60.0) if file else None, unsent_bytes=unsent_bytes))
        return made[0]

    gateway = compose(config_over(*replicas, **config), LOGGED, Surroundings(control_plane=control_plane))
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        await gateway.control.ready()
        yield run
        await gateway.control.stop()


@contextlib.asynccontextmanager
async def gateway_process(folder: Path, **config: Any) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A whole gateway on a free port: its URL, and its process, which is ended if it has not been yet."""
    base = {
        "listen": "127.0.0.1:0",
        "admin_listen": "off",
        "state": {"url": "off"},
        "routing": {"expose_headers": "all"},
        "limits": {"drain_accept_s": 0, "drain_timeout_s": 1},
    }
    file = folder / "gateway.yaml"
    file.write_text(json.dumps({**base, **config}))
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    assert process.stdout
    try:
        url = ""
        while not url:
            line = json.loads(await process.stdout.readline())
            url = line.get("url", "") if line["message"] == "listening" else ""
        rest = asyncio.create_task(process.stdout.read())
        yield url, process
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
        await rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
