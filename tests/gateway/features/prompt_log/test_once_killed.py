"""Gateways and replicas as processes that are killed: the clients of each token get one answer, generated once, and once more
after each runner that was killed with it. The ledger has each of these generations, but those that a gateway was killed with.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import Connection, text

from bench.measure.ports import free_port
from gateway.database.database import Database
from gateway.features.histories.tables import TABLES
from tests.deploy.processes import answers
from tests.gateway.features.prompt_log.kept import CHAT, body_of, told_in, told_in_stream
from tests.gateway.features.prompt_log.test_once import text_of
from tests.support.paths import ROOT
from tests.support.postgres import PASSWORD
from tests.support.tiers import gate

# An engine with another text in each answer. It says when it begins a generation, and when the whole answer is written.
ENGINE = """
import asyncio, os, random, sys
from tests.support.fakes import FakeReplica, answers, streams

count = 0

async def generates(request, writer):
    global count
    count += 1
    asked, text = request.json["messages"][-1]["content"], f"{os.getpid()}-{count}"
    print("begun", asked, flush=True)
    await asyncio.sleep(random.random() / 5)
    await (streams("answer ", text) if request.json.get("stream") else answers(f"answer {text}"))(request, writer)
    await writer.drain()
    print("made", asked, flush=True)

async def main():
    async with FakeReplica([generates], port=int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""


TOKENS = 104  # of each generation, as the engine counts them


class Program:
    """A process that is killed and started again at its port. lines: its output, of all processes."""

    def __init__(self, *arguments: str, ready: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.lines = list[str]()
        self._arguments = arguments
        self._ready = ready
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pipe, environment = asyncio.subprocess.PIPE, {**os.environ, "PGPASSWORD": PASSWORD}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._arguments, cwd=ROOT, env=environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        while not await asyncio.to_thread(answers, self.url + self._ready):
            assert self._process.returncode is None, self.lines[-20:]
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self._process
        assert self._reading
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def stop(self) -> None:
        """Lets it end by itself, so that nothing is lost."""
        assert self._process
        self._process.terminate()
        await self._process.wait()

    async def _read(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            self.lines.append(line.decode().strip())


class Stage:
    """Two gateways on one store, two engines, and clients. answers: by token. restarts: of runners that were killed with a
    token.
    """

    def __init__(self, folder: Path, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self.answers = dict[str, list[tuple[str, str]]]()
        self.restarts = Counter[str]()
        self.engines = [self._engine(free_port()) for _ in range(2)]
        self.gateways = [self._gateway(folder, url, free_port()) for _ in range(2)]
        self._url = url
        self._folder = folder
        self._session = session
        self._chance = random.Random(seed)
        self._numbers = itertools.count()

    def _engine(self, port: int) -> Program:
        return Program("-c", ENGINE, str(port), ready="/v1/models", port=port)

    def _gateway(self, folder: Path, url: str, port: int) -> Program:
        config = folder / "gateway.yaml"
        pool = {"name": "p", "replicas": [each.url for each in self.engines]}
        state, ledger = {"url": url.replace(f":{PASSWORD}@", "@")}, {"url": f"sqlite:///{folder}/ledger.db"}
        config.write_text(json.dumps({"pools": [pool], "state": state, "ledger": ledger}))
        return Program("-m", "gateway", "serve", "--config", str(config), "--port", str(port), ready="/v1/models", port=port)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        programs = [*self.engines, *self.gateways]
        try:
            await asyncio.gather(*(each.start() for each in programs))
            yield
        finally:
            await asyncio.gather(*(each.kill() for each in programs), return_exceptions=True)

    def said(self, word: str) -> Counter[str]:
        """Generations by the token of their request: begun, or made."""
        lines = [line.split() for engine in self.engines for line in engine.lines]
        return Counter(line[1] for line in lines if len(line) == 2 and line[0] == word)

    async def client(self, token: str, gateway: Program | None = None) -> None:
        """Asks again until it has the answer. gateway: None: any."""
        while True:
            if await self._asked(token, gateway or self._chance.choice(self.gateways)):
                return
            await asyncio.sleep(0.1)

    async def _asked(self, token: str, gateway: Program) -> bool:
        stream, leaves = self._chance.random() < 0.7, self._chance.random() < 0.3
        body = body_of(CHAT, [{"role": "user", "content": token}], stream=stream)
        headers = {"Authorization": "Bearer k", "Prompt-Log": f'once="{token}"'}
        try:
            async with self._session.post(gateway.url + CHAT, json=body, headers=headers) as answer:
                if leaves:
                    await answer.content.read(self._chance.randrange(1, 400))
                    return False
                raw = await answer.read()
        except (aiohttp.ClientError, ConnectionError):
            return False
        if answer.status != 200:
            assert answer.status in (409, 500, 502, 503), raw
            return False
        if stream and b'"prompt_log"' not in raw:  # it broke off, with or without the event of an error
            return False
        told: dict[str, Any] = told_in_stream(CHAT, raw)[1] if stream else told_in(answer.headers)
        if told["kept"]:
            self.answers.setdefault(token, []).append((told["head"], text_of(CHAT, raw, stream=stream)))
        return bool(told["kept"])

    async def kill_engine(self) -> None:
        engine = self._chance.choice(self.engines)
        await engine.kill()
        await engine.start()

    async def kill_gateway(self) -> None:
        """Its tokens are free at once, as after the 60 s of a silent runner."""
        gateway = self._chance.choice(self.gateways)
        prefix = f"{await self._process_of(gateway)}-%"
        await gateway.kill()
        mine = "turn = '' and runner like :prefix"
        found = await self._executed(f"select token from warmroute_once where {mine}", prefix=prefix)
        self.restarts.update(token for (token,) in found)
        silent = f"update warmroute_once set alive_until = :past where {mine}"
        await self._executed(silent, prefix=prefix, past=time.time() - 1)
        await gateway.start()

    async def counted(self) -> list[tuple[str, int, int]]:
        """Ends the gateways. Of each token that has ended at one of them: (token, its rows in the ledger, their tokens)."""
        processes = [await self._process_of(gateway) for gateway in self.gateways]
        await asyncio.gather(*(gateway.stop() for gateway in self.gateways))
        ended = await self._executed("select token, runner from warmroute_once where turn != ''")
        rows = "select count(*), coalesce(sum(prompt + completion), 0) from warmroute_usage where request = ? and metered = 1"
        with contextlib.closing(sqlite3.connect(self._folder / "ledger.db")) as file:
            mine = [(token, runner) for token, runner in ended if runner.partition("-")[0] in processes]
            return [(token, *file.execute(rows, [runner]).fetchone()) for token, runner in mine]

    async def _process_of(self, gateway: Program) -> str:
        """The part of its runners' names that tells the process."""
        probe = f"probe-{next(self._numbers):04}"
        await self.client(probe, gateway)
        [(runner,)] = await self._executed("select runner from warmroute_once where token = :token", token=probe)
        return str(runner.partition("-")[0])

    async def _executed(self, statement: str, **values: Any) -> list[Any]:
        """The rows of a statement."""

        def work(connection: Connection) -> list[Any]:
            result = connection.execute(text(statement), values)
            return list(result.all()) if result.returns_rows else []

        database = Database(self._url, TABLES)
        await database.open()
        try:
            return await database.write(work)
        finally:
            await database.close()


@gate("sqlite-24-2", reason="one kill of each kind; the store's statements have tests with Postgres (test_once_store.py)")
@pytest.mark.parametrize(("tokens", "kills"), [(24, 2), (400, 24)])
async def test_killed_processes_cost_no_token_its_answer(tokens: int, kills: int, url: str, tmp_path: Path) -> None:
    limit = asyncio.Semaphore(24)

    async def two(stage: Stage, token: str) -> None:
        async with limit:
            await asyncio.gather(stage.client(token), stage.client(token))

    async with aiohttp.ClientSession() as session:
        stage = Stage(tmp_path, url, session, tokens)
        async with stage.running():
            names = [f"token-{number:06}" for number in range(tokens)]
            clients = asyncio.gather(*(two(stage, token) for token in names))
            for at in range(kills):
                # What it waits for is in another process.
                while stage.said("begun").total() < tokens * (at + 1) // (kills + 1) and not clients.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await (stage.kill_engine() if at % 2 else stage.kill_gateway())
            await clients
            counted = await stage.counted()
        made = stage.said("made")
        assert len(counted) >= len(stage.gateways)
        assert {(rows, tokens) for _, rows, tokens in counted} == {(1, TOKENS)}, counted
        assert stage.answers.keys() >= set(names)
        assert all(len(set(found)) == 1 for found in stage.answers.values()), "one head and one text, whoever asks"
        lines = [line for gateway in stage.gateways for line in gateway.lines]
        unkept = sum("a turn was not kept" in line for line in lines)  # its answer was in the memory of a process
        assert all(made[token] for token in names)
        assert sum(max(0, made[token] - 1 - stage.restarts[token]) for token in names) <= unkept
        assert not any("Traceback" in line for line in lines), lines[-50:]
