"""Gateways in this process that share through a real server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Surroundings, compose
from gateway.cluster.commands import SingleProcess
from gateway.cluster.snapshots.keeper import SnapshotFile
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
    *replicas: FakeReplica, file: Path | None = None, dies: bool = False, **config: Any
) -> AsyncIterator[Running]:
    """A gateway that is one process. file: of its snapshots. dies: it ends as a process does that is killed."""
    made: list[SingleProcess] = []

    def control_plane(local: Any) -> SingleProcess:
        made.append(SingleProcess(local, snapshot=SnapshotFile(file, 60.0) if file else None))
        return made[0]

    gateway = compose(config_over(*replicas, **config), LOGGED, Surroundings(control_plane=control_plane))
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        await gateway.control.ready()
        yield run
        if not dies:
            await gateway.control.stop()
