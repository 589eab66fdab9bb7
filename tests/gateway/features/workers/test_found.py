"""Replicas that sources find, in a gateway of several workers: real processes, and an API server in this one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from gateway.commands.demo.processes import listening_url
from tests.chaos.stage import Child
from tests.gateway.conftest import BODY, eventually
from tests.support.fakes import FakeReplica
from tests.support.kubernetes import SLICES, FakeKubernetes, endpoint, slice_of


class Workers:
    """A gateway of two workers. url, admin_url: of its listeners."""

    def __init__(self, child: Child, url: str, admin_url: str) -> None:
        self.child = child
        self.url = url
        self.admin_url = admin_url

    def started(self) -> list[int]:
        """The process ids of all workers so far."""
        records = [json.loads(line) for line in self.child.lines]
        return [record["pid"] for record in records if record["message"] == "worker started"]

    def serving(self, worker: int) -> bool:
        """Whether a worker has logged anything about a replica, which it does before it serves."""
        records = [json.loads(line) for line in self.child.lines]
        return any(record.get("worker") == worker and record["message"] == "replica up" for record in records)

    async def replace(self, number: int) -> None:
        """The worker is killed, and the one that follows it knows its replicas."""
        os.kill(self.started()[number - 1], signal.SIGKILL)
        await eventually(lambda: self.serving(number + 2))

    async def asked(self, path: str, body: dict[str, Any] | None = None, url: str = "") -> tuple[int, Any]:
        """On a connection of its own, which any worker may get."""
        method = "GET" if body is None else "POST"
        async with aiohttp.ClientSession() as session, session.request(method, (url or self.url) + path, json=body) as answer:
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def two_workers(server: FakeKubernetes, folder: Path) -> AsyncIterator[Workers]:
    config = {
        "listen": "127.0.0.1:0",
        "workers": 2,
        "state": {"url": "off"},
        "limits": {"drain_accept_s": 0},
        "discovery": [{"kubernetes": {"service": "vllm", "server": server.url}}],
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    with contextlib.ExitStack() as ends:
        child = Child(folder / "log", ends, "-m", "gateway", "serve", "--config", str(folder / "c.yaml"))
        url = await child.wait_for_line(listening_url)
        line = await child.wait_for_line(lambda each: json.loads(each) if '"listening"' in each else None)
        yield Workers(child, url, line["admin_url"])


async def put(server: FakeKubernetes, name: str, replica: FakeReplica) -> None:
    await server.put(SLICES, slice_of(name, endpoint("127.0.0.1", name), port=replica.port))


async def test_a_worker_that_follows_another_knows_what_was_found_although_the_source_is_away(tmp_path: Path) -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, server.serving():
        await put(server, "pod", one)
        async with two_workers(server, tmp_path) as gateway:
            assert (await gateway.asked("/v1/chat/completions", BODY))[0] == 200
            server.refusals = [(503, {})] * 1_000_000
            server.cut_streams()
            await gateway.replace(1)
            await gateway.replace(2)  # now there is none that has found it itself
            answers = await asyncio.gather(*(gateway.asked("/v1/chat/completions", BODY) for _ in range(20)))
            assert {status for status, _ in answers} == {200}


async def test_a_drain_of_what_was_found_outlives_the_workers(tmp_path: Path) -> None:
    server = FakeKubernetes()
    async with FakeReplica() as one, FakeReplica() as two, server.serving():
        await put(server, "one", one)
        await put(server, "two", two)
        async with two_workers(server, tmp_path) as gateway:
            assert (await gateway.asked("/warmroute/drain", {"name": "one"}, gateway.admin_url))[0] == 200
            await gateway.replace(1)
            await gateway.replace(2)
            for _ in range(6):
                listed = (await gateway.asked("/warmroute/replicas", url=gateway.admin_url))[1]["replicas"]
                assert {row["name"]: row["draining"] for row in listed} == {"one": True, "two": False}
            answers = await asyncio.gather(*(gateway.asked("/v1/chat/completions", BODY) for _ in range(20)))
            assert {status for status, _ in answers} == {200}
            assert not one.requests
