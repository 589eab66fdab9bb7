"""Runs in the background in real processes: two workers, and a gateway that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
from pathlib import Path

import aiohttp
import openai

from gateway.app import compose
from gateway.commands.demo.processes import listening_url
from gateway.core import Surroundings
from gateway.server.endpoints import clients_runner
from tests.chaos.stage import Child
from tests.gateway.conftest import LOGGED, config_over, serving_runner
from tests.gateway.features.responses.test_recall import kept_in
from tests.gateway.features.runs.test_runs import Slow
from tests.support.fakes import FakeReplica


async def started(folder: Path, ends: contextlib.ExitStack, replica: FakeReplica, workers: int = 1) -> tuple[Child, str]:
    config = {
        "listen": "127.0.0.1:0",
        "admin_listen": "off",
        "pools": [{"replicas": [replica.url]}],
        "state": kept_in(folder),
        "workers": workers,
        "limits": {"drain_accept_s": 0},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    child = Child(folder / "log", ends, "-m", "gateway", "serve", "--config", str(folder / "c.yaml"))
    return child, await child.wait_for_line(listening_url)


async def asked(url: str, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """On a connection of its own, which any worker may get."""
    async with aiohttp.ClientSession() as session, session.request(method, f"{url}/v1/responses{path}", json=body) as answer:
        found: dict[str, object] = await answer.json()
        return found


async def test_any_worker_sees_and_cancels_it(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one:
        with contextlib.ExitStack() as ends:
            _, url = await started(tmp_path, ends, one, workers=2)
            body = {"model": "m", "input": "a", "background": True}
            made = await asyncio.gather(*(asked(url, "POST", "", body) for _ in range(6)))
            await slow.begun.wait()
            found = [await asked(url, "GET", f"/{each['id']}") for each in made]
            assert {each["status"] for each in found} <= {"queued", "in_progress"}
            cancelled = [await asked(url, "POST", f"/{each['id']}/cancel") for each in made]
            assert {each["status"] for each in cancelled} == {"cancelled"}
            await slow.left.wait()


async def test_a_killed_gateway_leaves_none_running_for_ever(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as one:
        with contextlib.ExitStack() as ends:
            child, url = await started(tmp_path, ends, one)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
                first = await client.responses.create(model="m", input="a", background=True)
                await slow.begun.wait()
                child.signal(signal.SIGKILL)
                await child.exit_status()
        with contextlib.closing(sqlite3.connect(tmp_path / "kept.sqlite")) as file:
            ((until,),) = file.execute("select alive_until from warmroute_runs").fetchall()
        now = [until - 1]
        gateway = compose(config_over(one, state=kept_in(tmp_path)), LOGGED, Surroundings(wall_clock=lambda: now[0]))
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            assert (await run.client.responses.retrieve(first.id)).status in ("queued", "in_progress")
            now[0] = until
            last = await run.client.responses.retrieve(first.id)
            assert last.status == "failed"
            assert last.error
            assert "restarted" in last.error.message
