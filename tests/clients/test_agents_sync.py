"""Codex, Claude Code and OpenCode through `warmroute sync`: what reaches the engine is what they sent. `make test-clients`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from bench.fleet.stage import ready
from bench.measure.ports import free_port
from gateway.features.prompt_log.naming.chain import EMPTY, head_name
from tests.clients.agent_engine import AgentEngine, Script
from tests.clients.programs import AGENTS, claude_code
from tests.clients.test_agents import ALL_AGENTS, CONFIG, FULL
from tests.clients.watching import FORMS, Watched, name_of, watching

CALLS: Final = 6
SESSIONS: Final = 2
Agent = Callable[[Path, str, int], Awaitable[str]]
WEBSOCKET: Final = "codex, websocket"  # sends only what is new itself, and passes no proxy of ours
THROUGH: Final[dict[str, Agent]] = {name: begin for name, (begin, _, _) in ALL_AGENTS.items() if name != WEBSOCKET}
# In its third call the agent waits until something is done elsewhere.
PAUSE: Final = "test {call} != 2 || {{ touch waits; until test -e goes-on; do sleep 0.1; done; }}; echo step{call}"

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not AGENTS.is_dir(), reason="needs scripts/clients.sh")]


@dataclass
class Program:
    """A gateway with these arguments, which can be restarted at its URL."""

    url: str
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "gateway", *self.arguments]
        self.process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        await ready([self.url], "/health")
        if self.arguments[0] == "serve":  # a slow machine takes longer to open the store than an answer waits for it
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/v1/logs/{head_name(EMPTY)}") as answer:
                await answer.read()

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def delta_requests(self) -> Counter[str]:
        """Since its start, by result."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        name = 'warmroute_delta_requests_total{result="'
        pairs = (line.removeprefix(name).split('"} ') for line in lines if line.startswith(name))
        return Counter({result: int(float(count)) for result, count in pairs})


@dataclass
class Stage:
    """url: for agents. far: the gateway that keeps logs, in a file of `folder`. near: the sidecar. sent: by agents."""

    folder: Path
    engine: AgentEngine
    far: Program
    near: Program
    sent: Watched
    url: str = ""

    def check(self) -> None:
        """The engine got what the agents have sent."""
        got = Counter(name_of(one.path.partition("?")[0], one.body) for one in self.engine.requests if is_asked(one.path))
        sent = Counter(self.sent.conversations)
        assert not sent - got, "what an agent has an answer to was sent so"
        assert len(got) == len(sent), "and nothing else; a cut request was sent again"


def is_asked(path: str) -> bool:
    return path.partition("?")[0] in FORMS


@contextlib.asynccontextmanager
async def staged(folder: Path, asks: Script) -> AsyncIterator[Stage]:
    async with AgentEngine(asks=asks) as engine:
        far, near = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        config = {"listen": far, "admin_listen": "off", "pools": [{"replicas": [engine.url]}], **CONFIG}
        file = folder / "gateway.json"
        file.write_text(json.dumps({**config, "state": {"url": f"sqlite:///{folder}/state.db"}}), encoding="utf-8")
        stage = Stage(
            folder,
            engine,
            Program(f"http://{far}", ["serve", "--config", str(file)]),
            Program(f"http://{near}", ["sync", "--upstream", f"http://{far}", "--listen", near]),
            Watched(),
        )
        try:
            await stage.far.start()
            await stage.near.start()
            async with watching(stage.near.url, stage.sent) as stage.url:
                yield stage
        finally:
            await stage.near.kill()
            await stage.far.kill()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", THROUGH)
async def test_two_sessions_at_once_upload_only_their_new_turns(agent: str, tmp_path: Path) -> None:
    async with staged(tmp_path, Script(CALLS)) as stage:
        homes = [tmp_path / str(number) for number in range(SESSIONS)]
        said = await asyncio.gather(*(THROUGH[agent](home, stage.url, at) for at, home in enumerate(homes)))
        assert all("Done." in each for each in said)
        stage.check()
        results = await stage.near.delta_requests()
        assert results["delta"] >= SESSIONS * CALLS
        assert not results["replayed"] + results["off"]


async def store_lost(stage: Stage) -> None:
    await stage.far.kill()
    for file in stage.folder.glob("state.db*"):
        file.unlink()
    await stage.far.start()


@pytest.mark.timeout(1300)
async def test_codex_over_a_websocket_goes_as_deltas(tmp_path: Path) -> None:
    begin, _, _ = ALL_AGENTS[WEBSOCKET]
    async with staged(tmp_path, Script(CALLS)) as stage:
        assert "Done." in await begin(tmp_path / "home", stage.near.url, 1)
        results = await stage.near.delta_requests()
        assert results["delta"] >= CALLS
        assert not results["replayed"] + results["off"]


RESTARTS: Final[dict[str, Callable[[Stage], Awaitable[None]]]] = {
    "sidecar": lambda stage: stage.near.restart(),
    "gateway": lambda stage: stage.far.restart(),
    "gateway, store lost": store_lost,
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", RESTARTS)
@pytest.mark.parametrize("agent", THROUGH)
async def test_a_restart_between_two_calls_costs_one_whole_upload(agent: str, what: str, tmp_path: Path) -> None:
    async with staged(tmp_path, Script(CALLS, PAUSE)) as stage:
        home = tmp_path / "home"
        running = asyncio.create_task(THROUGH[agent](home, stage.url, 1))
        while not (running.done() or (home / "work" / "waits").exists()):  # noqa: ASYNC110  (another program makes it)
            await asyncio.sleep(0.1)
        assert not running.done(), running.result()
        await RESTARTS[what](stage)
        (home / "work" / "goes-on").touch()
        assert "Done." in await running
        stage.check()
        results = await stage.near.delta_requests()
        assert results["delta"] >= CALLS - 3
        assert results["replayed"] == (what == "gateway, store lost")
        assert not results["off"]


@pytest.mark.timeout(1300)
async def test_claude_code_compacts_behind_the_sidecar(tmp_path: Path) -> None:
    async with staged(tmp_path, Script(2)) as stage:
        await claude_code(tmp_path / "home", stage.url, 1)
        stage.engine.full = FULL["vllm"]
        assert "Done." in await claude_code(tmp_path / "home", stage.url, 2, "", "--continue")
        refused = len(stage.engine.requests) - len(stage.sent.conversations)
        assert refused == 1, "the full context is refused once, and is not sent again whole"
